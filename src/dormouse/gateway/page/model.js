// What is known of the node: the last picture, with all changes that have come since.

export const POINTS = 60;

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    this.known = false;
    this.functions = new Map();
    this.histories = new Map();
    this.devices = [];
    this.loads = [];
    this.queue = [];
    this.host = null;
    this.totals = null;
    this.currency = "";
    this.bucket = 0;
    this.bucketMs = 5000;
    this.ahead = 0;
  }

  picture(data) {
    this.clear();
    this.known = true;
    this.node = data.node;
    this.functions = new Map(Object.entries(data.functions));
    this.histories = new Map(Object.entries(data.histories));
    this.bucketMs = data.bucket_ms;
    this.bucket = data.bucket;
    this.take(data);
  }

  changes(data) {
    for (const [name, fields] of Object.entries(data.functions || {})) {
      if (fields === null) {
        this.functions.delete(name);
        this.histories.delete(name);
      } else this.functions.set(name, Object.assign(this.functions.get(name) || {}, fields));
    }
    if ("bucket" in data) this.points(data);
    this.take(data);
  }

  take(data) {
    for (const name of ["devices", "loads", "queue", "host", "totals", "currency"]) if (name in data) this[name] = data[name];
    this.ahead = Date.now() - data.at_ms;
  }

  points(data) {
    const come = data.bucket - this.bucket;
    this.bucket = data.bucket;
    for (const name of this.functions.keys()) {
      const fresh = Object.hasOwn(data.points, name) ? data.points[name] : new Array(Math.min(come, POINTS)).fill(null);
      const points = this.histories.get(name) || [];
      points.push(...fresh);
      this.histories.set(name, points.slice(-POINTS));
    }
  }

  // The server's time, as far as it is known.
  now() {
    return Date.now() - this.ahead;
  }

  progress(load) {
    const passed = this.now() - load.started_ms;
    return { share: Math.max(0, Math.min(passed / Math.max(load.expected_ms, 0.1), 0.99)), left: load.expected_ms - passed };
  }
}
