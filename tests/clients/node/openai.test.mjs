// The official client, against a simulated model and a small real one.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = (url) => new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const sim = client(process.env.SIM_URL);
const smollm2 = client(process.env.SMOLLM2_URL);
const hello = [{ role: "user", content: "Hello" }];
const capital = [{ role: "user", content: "What is the capital of France?" }];

test("models", async () => {
  const names = [];
  for await (const model of sim.models.list()) names.push(model.id);
  assert.deepEqual(names, ["sim", "simulated"]);
  assert.equal((await sim.models.retrieve("simulated")).object, "model");
});

test("chat", async () => {
  const answer = await smollm2.chat.completions.create({ model: "smollm2", messages: capital, temperature: 0, max_tokens: 16 });
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a stream is the answer in pieces", async () => {
  const request = { model: "sim", messages: hello, seed: 5, max_tokens: 40 };
  const whole = await sim.chat.completions.create(request);
  const stream = await sim.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("the stream helper puts it together", async () => {
  const runner = sim.chat.completions.stream({ model: "sim", messages: hello, seed: 6, max_tokens: 20 });
  const events = [];
  runner.on("content", (delta) => events.push(delta));
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.content, events.join(""));
});

test("a stream can be left", async () => {
  const stream = await sim.chat.completions.create({ model: "sim", messages: hello, stream: true, ignore_eos: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("logprobs and several choices", async () => {
  const answer = await sim.chat.completions.create({ model: "sim", messages: hello, n: 2, logprobs: true, top_logprobs: 3, max_tokens: 5, ignore_eos: true });
  assert.equal(answer.choices.length, 2);
  assert.equal(answer.choices[1].logprobs.content[0].top_logprobs.length, 3);
});

test("completions", async () => {
  const answer = await sim.completions.create({ model: "sim", prompt: ["a", "b"], max_tokens: 4 });
  assert.deepEqual(
    answer.choices.map((choice) => choice.index),
    [0, 1],
  );
});

test("errors are of the client's own kinds", async () => {
  const wrong = (body) => sim.chat.completions.create({ model: "sim", messages: hello, ...body });
  await assert.rejects(wrong({ temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(wrong({ temprature: 1 }), { code: "unknown_parameter", param: "temprature" });
  await assert.rejects(wrong({ model: "gpt-4o" }), (error) => error instanceof OpenAI.NotFoundError);
  await assert.rejects(wrong({ max_tokens: 100_000 }), { status: 400 });
});

// The simulated model says what it is asked to.
const say = (text) => [{ role: "user", content: `<say>${text}</say>` }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"], additionalProperties: false },
  },
};
const call = '{"name": "get_weather", "arguments": {"place": "Ely"}}';

test("tools: a call, and its result", async () => {
  const answer = await sim.chat.completions.create({ model: "sim", messages: say(call), tools: [weather] });
  const { message, finish_reason: reason } = answer.choices[0];
  assert.equal(reason, "tool_calls");
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { place: "Ely" });
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Rain." };
  const next = await sim.chat.completions.create({ model: "sim", messages: [...say("It rains."), message, result], tools: [weather] });
  assert.equal(next.choices[0].finish_reason, "stop");
});

test("tools: a streamed call is put together", async () => {
  const runner = sim.chat.completions.stream({ model: "sim", messages: say(call), tools: [weather] });
  const calls = (await runner.finalChatCompletion()).choices[0].message.tool_calls;
  assert.equal(calls.length, 1);
  assert.equal(calls[0].function.name, "get_weather");
  assert.deepEqual(JSON.parse(calls[0].function.arguments), { place: "Ely" });
});

test("tools: functions are run by the client", async () => {
  const run = { ...weather, function: { ...weather.function, parse: JSON.parse, function: ({ place }) => `<say>Rain in ${place}.</say>` } };
  const runner = sim.chat.completions.runTools({ model: "sim", messages: say(call), tools: [run] });
  assert.equal(await runner.finalContent(), "Rain in Ely.");
});

test("tools: what a stream was put together to goes back", async () => {
  const { message } = (await sim.chat.completions.stream({ model: "sim", messages: say(call), tools: [weather] }).finalChatCompletion()).choices[0];
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "<say>Rain.</say>" };
  const next = await sim.chat.completions.create({ model: "sim", messages: [...hello, message, result], tools: [weather] });
  assert.equal(next.choices[0].message.content, "Rain.");
});

test("tools: a call that is required is made", async () => {
  const choice = { type: "function", function: { name: "get_weather" } };
  const answer = await smollm2.chat.completions.create({ model: "smollm2", messages: hello, tools: [weather], tool_choice: choice, temperature: 0 });
  const made = answer.choices[0].message.tool_calls[0].function;
  assert.equal(made.name, "get_weather");
  assert.equal(typeof JSON.parse(made.arguments).place, "string");
});

test("structured output is parsed", async () => {
  const schema = { type: "object", properties: { capital: { type: "string", maxLength: 20 } }, required: ["capital"], additionalProperties: false };
  const answer = await smollm2.chat.completions.parse({
    model: "smollm2",
    messages: capital,
    temperature: 0,
    response_format: { type: "json_schema", json_schema: { name: "capital", strict: true, schema } },
  });
  assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)), ["capital"]);
});

test("embeddings", async () => {
  const embedder = client(process.env.EMBEDDER_URL);
  const answer = await embedder.embeddings.create({ model: "embedder", input: ["a load line", "a mark"] });
  assert.equal(answer.data.length, 2);
  const length = Math.hypot(...answer.data[0].embedding);
  assert.ok(Math.abs(length - 1) < 1e-5, `${length}`);
});
