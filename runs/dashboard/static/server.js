// Questions to TensorBoard's server.

const AT_ONCE = 4;
let running = 0;
const waiting = [];

// The server's answer to a question, as JSON; a few at a time. Throws with what went wrong.
export async function ask(question, parameters = {}) {
  if (running >= AT_ONCE) await new Promise((go) => waiting.push(go));
  running += 1;
  try {
    const query = new URLSearchParams(Object.entries(parameters).filter(([, v]) => v !== null));
    const answer = await fetch(`./${question}?${query}`);
    if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`.slice(0, 300));
    return await answer.json();
  } finally {
    running -= 1;
    waiting.shift()?.();
  }
}
