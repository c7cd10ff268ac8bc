// Calls of the server: JSON, and event streams over fetch (which can carry an API key, unlike EventSource).

const STORE = "omni-flow-key";

export const key = {
  get: () => sessionStorage.getItem(STORE) || "",
  set: (value) => (value ? sessionStorage.setItem(STORE, value) : sessionStorage.removeItem(STORE)),
};

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message || `HTTP ${status}`);
    this.status = status;
    this.error = error;
  }
}

function headers(body) {
  const found = {};
  if (key.get()) found.authorization = `Bearer ${key.get()}`;
  if (body && !(body instanceof FormData)) found["content-type"] = "application/json";
  return found;
}

export async function call(method, path, body, signal) {
  const sent = body === undefined ? undefined : body instanceof FormData ? body : JSON.stringify(body);
  const answer = await fetch(path, { method, headers: headers(body), body: sent, signal });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, told.error);
  }
  return answer;
}

export const get = async (path) => (await call("GET", path)).json();

// Yields {event, data} of a stream; data is parsed JSON, or the text itself.
export async function* events(method, path, body, signal) {
  const answer = await call(method, path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const block = buffer.slice(0, end);
        buffer = buffer.slice(end + 2);
        let event = "message", data = "";
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        if (data === "[DONE]") return;
        yield { event, data: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
