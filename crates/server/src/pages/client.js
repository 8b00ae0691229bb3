// The server's API for the page.

// An error response of the server.
export class ApiError extends Error {
  constructor(status, error = {}) {
    super(error.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.param = error.param;
    this.code = error.code;
  }

  // Whether the server is between its end and the end of its next start.
  get restarts() {
    return this.status === 0 || this.code === "starting";
  }
}

export class Client {
  // Not stored: it is lost when the page is closed.
  key = "";

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "The server cannot be reached." });
    }
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      throw new ApiError(response.status, body.error);
    }
    return response;
  }

  async get(path) {
    return (await this.#fetch(path)).json();
  }

  // The chunks of a streamed answer, each with the time at which it was received.
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const { data, time } of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(200, chunk.error);
      yield { chunk, time };
    }
    throw new ApiError(200, { message: "The connection ended before the answer did." });
  }
}

// The data of server-sent events. Those that are received together have the same time.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const time = performance.now();
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length > 0) yield { data: lines.map((line) => line.slice(5).trimStart()).join("\n"), time };
    }
  }
}
