// Speaks to the server: its health, its model, and streamed answers.

const key = () => sessionStorage.getItem("api-key") ?? "";

export function keepKey(value) {
  if (value) sessionStorage.setItem("api-key", value);
  else sessionStorage.removeItem("api-key");
}

export const keptKey = key;

// What went wrong, in words for the person at the page. kind: "key", "busy", "refused", "gone" or "cut".
export class Trouble extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

function headers() {
  const all = { "Content-Type": "application/json" };
  if (key()) all.Authorization = `Bearer ${key()}`;
  return all;
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("gone", "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch {
    said = response.statusText; // not the server's own error page, so its status is all there is
  }
  if (response.status === 401 || response.status === 403) {
    return new Trouble("key", key() ? "The server refuses this API key." : "The server wants an API key: see Settings.");
  }
  if (response.status === 429) {
    const wait = response.headers.get("Retry-After");
    return new Trouble("busy", `The server is full${wait ? `: try again in ${wait} s` : ", try again later"}.`);
  }
  if (response.status === 503) return new Trouble("busy", `The server is not ready${said ? `: ${said}` : ""}.`);
  return new Trouble("refused", `The server answered ${response.status}${said ? `: ${said}` : ""}`);
}

// {state, reason}: "ready", "gone", or what the server says of itself: "warming", "draining", "stopped" or "dead".
export async function health() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    if (response.ok) return { state: "ready" };
    const said = await response.json().catch(() => ({})); // something before the server may answer in its place
    return { state: said.status ?? "warming", reason: said.error };
  } catch {
    return { state: "gone" };
  }
}

// {id, strategies}: strategies may be undefined, for a server that does not tell.
export async function model() {
  const first = (await (await send("v1/models")).json()).data[0];
  return { id: first.id, strategies: first.eagle3?.strategies };
}

// Streams one answer: yields {text, pieces, accepted, strategy, finish, usage, stats}, whichever a chunk brought.
// pieces: [[text, depth], ...]; stats: the server's own numbers of the whole answer. Throws Trouble, or AbortError.
export async function* answer(body, signal) {
  const options = { method: "POST", body: JSON.stringify(body), signal };
  const response = await send("v1/chat/completions", options);
  let done = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Trouble("cut", `The server stopped: ${chunk.error.message}`);
      yield read(chunk);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Trouble) throw error;
    throw new Trouble("cut", "The connection broke before the answer ended.");
  }
  if (!done) throw new Trouble("cut", "The connection ended before the answer did.");
}

function read(chunk) {
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const own = chunk.eagle3 ?? {};
  const whole = own.tau !== undefined; // numbers of the answer, not of a round
  return {
    text,
    pieces: own.pieces ?? (text ? [[text, 0]] : []),
    accepted: whole ? null : own.accepted ?? null,
    strategy: own.strategy ?? null,
    finish: choice?.finish_reason ?? null,
    usage: chunk.usage ?? null,
    stats: whole ? own : null,
  };
}

// The data fields of server-sent events, as text.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // already closed or broken: nothing left to cancel
  }
}
