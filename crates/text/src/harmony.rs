//! Words of OpenAI's Harmony format (gpt-oss): <https://github.com/openai/harmony/blob/main/docs/format.md>.

pub(crate) const START: &str = "<|start|>";
pub(crate) const CHANNEL: &str = "<|channel|>";
pub(crate) const CONSTRAIN: &str = "<|constrain|>";
pub(crate) const MESSAGE: &str = "<|message|>";
pub(crate) const END: &str = "<|end|>";
/// Ends an answer.
pub(crate) const RETURN: &str = "<|return|>";
/// Ends an answer that calls a function.
pub(crate) const CALL: &str = "<|call|>";

/// All marks of the format.
pub(crate) const MARKS: [&str; 7] = [START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL];
/// Around the first reasoning of an answer.
pub(crate) const REASONING: [&str; 2] = ["<|channel|>analysis<|message|>", END];

/// What functions are called in headers.
pub(crate) const NAMESPACE: &str = "functions.";
/// Who writes the messages.
pub(crate) const ASSISTANT: &str = "assistant";
pub(crate) const ANALYSIS: &str = "analysis";
pub(crate) const COMMENTARY: &str = "commentary";
pub(crate) const FINAL: &str = "final";
/// Stands before the recipient of a message.
pub(crate) const RECIPIENT: &str = "to=";

/// Whether a chat template writes this format.
pub(crate) fn is_in(template: &str) -> bool {
    template.contains(REASONING[0])
}

/// A call as a model writes it; `arguments` is JSON text.
pub(crate) fn call(name: &str, arguments: &str) -> String {
    format!("{CHANNEL}commentary {RECIPIENT}{NAMESPACE}{name} {CONSTRAIN}json{MESSAGE}{arguments}{CALL}")
}
