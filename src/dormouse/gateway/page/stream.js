// The stream of events, read with fetch because EventSource sends no headers. Reconnects, each time a little later.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const SILENCE_MS = 30000; // the server says something every ten seconds

export class Stream {
  // `told`: picture(data), changes(data), state(name, text), refused(text)
  constructor(url, told) {
    this.url = url;
    this.told = told;
    this.key = "";
    this.wait = FIRST_WAIT_MS;
    this.timer = 0;
    this.abort = null;
  }

  start(key) {
    this.stop();
    this.key = key;
    this.connect();
  }

  stop() {
    clearTimeout(this.timer);
    if (this.abort) this.abort.abort();
    this.abort = null;
  }

  async connect() {
    const abort = new AbortController();
    this.abort = abort;
    let why = "The page has a fault";
    try {
      why = await this.once(abort);
    } catch (fault) {
      reportError(fault); // of ours: what the network does is told by a text
    }
    if (this.abort === abort && why !== null) this.again(why);
  }

  // One connection, until it ends: why it did, or null if there shall be no other.
  async once(abort) {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const answer = await fetch(this.url, { headers, signal: abort.signal, cache: "no-store" }).catch(() => null);
    if (this.abort !== abort) return null; // stopped, or started anew
    if (answer === null) return "The server cannot be reached";
    if (answer.status === 401) {
      this.told.refused(this.key ? "This key is not one of this server's, or it was revoked." : "");
      return null;
    }
    if (!answer.ok) return complaint(answer);
    return (await this.read(answer.body, abort)) || "The connection was lost";
  }

  async read(body, abort) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    let bye = "";
    let watchdog = 0;
    try {
      for (;;) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => reader.cancel().catch(() => {}), SILENCE_MS);
        const { done, value } = await reader.read().catch(() => ({ done: true }));
        if (done || this.abort !== abort) return bye;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) bye = this.take(part) || bye;
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  take(part) {
    const found = /^event: (\w+)\ndata: (.*)$/s.exec(part);
    if (!found) return ""; // a comment
    if (found[1] === "goodbye") return "The server has stopped";
    const data = JSON.parse(found[2]);
    if (found[1] === "picture") {
      this.wait = FIRST_WAIT_MS;
      this.told.state("live", "live");
      this.told.picture(data);
    } else this.told.changes(data);
    return "";
  }

  again(why) {
    const wait = this.wait * (0.75 + Math.random() / 2);
    this.told.state("lost", `${why}. Trying again${wait < 1500 ? "" : ` in ${Math.round(wait / 1000)} s`}.`);
    this.timer = setTimeout(() => this.connect(), wait);
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT_MS);
  }
}

async function complaint(answer) {
  try {
    return String((await answer.json()).error || answer.status).replace(/\.$/, "");
  } catch {
    return `The server answers ${answer.status}`;
  }
}
