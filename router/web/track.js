// KV on its way from a prefill worker to a decode worker, as batons that move. Whoever prefers
// reduced motion sees the lanes that are in use drawn strongly instead, and nothing moves.

import { h, svg } from "./dom.js";

const PASS_MS = 900;
const LOOP_MS = 1300;
const MAX_BATONS = 24;
const KEPT = 400;

export class Track {
  #field;
  #track;
  #lanes;
  #cluster = null;
  #batons = new Map(); // id of a handoff → {element, animation, state}
  #seen = new Map(); // ids of handoffs that have been drawn to their end, the oldest first
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(field, track, lanes) {
    this.#field = field;
    this.#track = track;
    this.#lanes = lanes;
    const redraw = () => this.#cluster && this.#draw();
    new ResizeObserver(redraw).observe(field);
    this.#still.addEventListener("change", redraw);
  }

  show(cluster) {
    const isFirst = this.#cluster === null;
    this.#cluster = cluster;
    if (isFirst) {
      // What had ended before anybody looked is history.
      for (const one of cluster.handoffs) if (one.end_ms !== null) this.#seen.set(one.id, true);
    }
    this.#draw();
  }

  #draw() {
    const { workers, handoffs } = this.#cluster;
    const box = this.#track.getBoundingClientRect();
    const boxOf = (name, role) => {
      const worker = workers.find((one) => one.name === name && one.role === role);
      const element = worker && [...this.#field.querySelectorAll(`.worker.of-${role}`)]
        .find((one) => one.dataset.address === worker.address);
      return element?.getBoundingClientRect();
    };
    const live = new Set(handoffs.filter((one) => one.end_ms === null).map(laneOf));
    const paths = new Map();
    for (const prefill of workers.filter((one) => one.role === "prefill")) {
      for (const decode of workers.filter((one) => one.role === "decode")) {
        const from = boxOf(prefill.name, "prefill");
        const to = boxOf(decode.name, "decode");
        if (!from || !to || prefill.address === decode.address) continue;
        const lane = laneOf({ prefill: prefill.name, decode: decode.name });
        const ready = prefill.ready && decode.ready;
        paths.set(lane, { d: curve(from, to, box), ready });
      }
    }
    this.#lanes.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    this.#lanes.replaceChildren(...[...paths].map(([lane, { d, ready }]) =>
      svg("path", { d, class: `lane${ready ? "" : " shut"}${live.has(lane) ? " live" : ""}` })));
    this.#move(handoffs, paths);
  }

  #move(handoffs, paths) {
    const present = new Set(handoffs.map((one) => one.id));
    for (const one of handoffs) {
      const path = paths.get(laneOf(one))?.d;
      if (!path || this.#seen.has(one.id)) continue;
      if (this.#still.matches) this.#drop(one.id);
      else if (this.#batons.has(one.id) || this.#batons.size < MAX_BATONS) this.#run(one, path);
    }
    for (const id of this.#batons.keys()) if (!present.has(id)) this.#drop(id);
  }

  #run(one, path) {
    let baton = this.#batons.get(one.id);
    if (!baton) {
      baton = { element: h("span", { class: "baton" }), animation: null, state: "" };
      this.#track.append(baton.element);
      this.#batons.set(one.id, baton);
    }
    baton.element.style.offsetPath = `path("${path}")`;
    if (baton.state === one.state) return;
    const wasMoving = baton.state === "shipping";
    baton.state = one.state;
    baton.element.dataset.state = one.state;
    if (one.state === "computing") return; // it waits in the runner's hand
    if (one.state === "shipping") {
      baton.animation = go(baton.element, { duration: LOOP_MS, iterations: Infinity });
      return;
    }
    this.#seen.set(one.id, true);
    for (const id of this.#seen.keys()) if (this.#seen.size > KEPT) this.#seen.delete(id);
    const done = () => this.#drop(one.id);
    if (one.state === "ended") {
      baton.animation?.cancel();
      setTimeout(done, PASS_MS);
    } else if (wasMoving) {
      baton.animation.effect.updateTiming({ iterations: baton.animation.effect.getComputedTiming().currentIteration + 1 });
      baton.animation.finished.then(done, () => {});
    } else {
      go(baton.element, { duration: PASS_MS, fill: "forwards" }).finished.then(done, () => {});
    }
  }

  #drop(id) {
    this.#batons.get(id)?.element.remove();
    this.#batons.delete(id);
  }
}

const laneOf = (one) => `${one.prefill} ${one.decode}`;

const go = (element, timing) =>
  element.animate([{ offsetDistance: "0%" }, { offsetDistance: "100%" }], {
    easing: "cubic-bezier(.5,.05,.4,1)", ...timing,
  });

// From the edge of one card to the edge of the other: sideways, or downwards on a narrow screen.
function curve(from, to, box) {
  if (to.left >= from.right) {
    const [x1, y1] = [from.right - box.left, from.top + from.height / 2 - box.top];
    const [x2, y2] = [to.left - box.left, to.top + to.height / 2 - box.top];
    const middle = (x1 + x2) / 2;
    return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  }
  const [x1, x2] = [from.left + from.width / 2 - box.left, to.left + to.width / 2 - box.left];
  const [y1, y2] = [0, box.height];
  return `M${x1} ${y1}C${x1} ${y2 / 2} ${x2} ${y2 / 2} ${x2} ${y2}`;
}
