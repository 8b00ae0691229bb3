/// Where in an answer a text ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Position {
    /// Before it: the model may reason first.
    #[default]
    Before,
    /// Within reasoning.
    Reasoning,
    /// After reasoning.
    Answer,
}
