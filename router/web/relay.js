// The pools as they are: each worker with its queue, its streams and its KV by state. What moves
// between them is drawn by track.js.

import { byId, h, keyed, setText } from "./dom.js";
import { bytes, count, ms, plural, problem } from "./format.js";
import { Track } from "./track.js";

const KV = [
  ["held", "in use"],
  ["promised", "promised"],
  ["pinned", "pinned"],
  ["cached", "cached"],
  ["free", "free"],
];
const MAX_LISTED = 4;

export class Relay {
  #track = new Track(byId("field"), byId("track"), byId("lanes"));
  #listed = new Map(); // handoffs by id, the newest last

  show(cluster) {
    const of = (role) => cluster.workers.filter((worker) => worker.role === role);
    const pools = { prefill: byId("prefills"), decode: byId("decodes") };
    for (const [role, list] of Object.entries(pools)) {
      const keyOf = (worker) => worker.address;
      keyed(list, of(role), keyOf, makeWorker, updateWorker);
      list.parentElement.hidden = !of(role).length && cluster.mode === "colocated";
    }
    const waiting = cluster.num_in_line ? `${cluster.num_in_line} of them waiting here for a worker with room` : "";
    const running = cluster.num_prompts ? `${plural(cluster.num_prompts, "prompt")} being served` : "idle";
    setText(byId("line"), waiting ? `${running}, ${waiting}` : running);
    this.#track.show(cluster);
    this.#list(cluster.handoffs);
  }

  #list(handoffs) {
    for (const one of [...handoffs].reverse()) {
      this.#listed.delete(one.id);
      this.#listed.set(one.id, one);
    }
    const last = [...this.#listed.values()].sort((a, b) => b.begin_ms - a.begin_ms).slice(0, MAX_LISTED);
    this.#listed = new Map(last.reverse().map((one) => [one.id, one]));
    const list = byId("handoffs");
    keyed(list, last.reverse(), (one) => one.id, () => h("li", {}), (element, one) => {
      element.dataset.state = one.state;
      setText(element, words(one));
    });
    if (!last.length) list.append(h("li", { class: "none" }, "None yet."));
  }
}

function words(one) {
  const size = one.nbytes ? bytes(one.nbytes) : plural(one.num_tokens, "token");
  const took = one.end_ms === null ? "" : ` in ${ms(one.end_ms - one.begin_ms)}`;
  const state = {
    computing: "being computed",
    shipping: "on its way",
    done: `${size}, ${count(one.num_tokens)} tokens${took}, computing included`,
    ended: `not completed: ${one.outcome}`,
  }[one.state];
  return `${one.prefill} → ${one.decode}: ${one.state === "done" || one.state === "ended" ? state : `${size} ${state}`}`;
}

function makeWorker(worker) {
  const fact = (name) => h("div", { class: `fact ${name}` }, h("dt", {}), h("dd", {}));
  return h("li", { class: `worker of-${worker.role}` },
    h("div", { class: "worker-head" },
      h("span", { class: "lamp", "aria-hidden": "true" }),
      h("b", { class: "worker-name" }),
      h("span", { class: "worker-state" })),
    h("dl", { class: "facts" }, fact("one"), fact("two"), fact("three")),
    h("div", { class: "kv-bar", role: "img" }, KV.map(([state]) => h("i", { class: `kv ${state}` }))),
    h("p", { class: "kv-text" }));
}

function updateWorker(element, worker) {
  const find = (selector) => element.querySelector(selector);
  element.dataset.ready = worker.ready;
  element.dataset.address = worker.address;
  element.dataset.busy = worker.num_running > 0;
  setText(find(".worker-name"), worker.name);
  const state = worker.ready ? (worker.num_running ? "busy" : "idle") : problem(worker.problem);
  setText(find(".worker-state"), state);
  const facts = worker.role === "prefill"
    ? [["computing", worker.num_running], ["waiting", worker.num_waiting], ["queue", worker.queue_ms ? ms(worker.queue_ms) : "none"]]
    : [["streams", worker.num_running], ["awaiting KV", worker.num_awaiting_kv], ["waiting", worker.num_waiting]];
  element.querySelectorAll(".fact").forEach((fact, index) => {
    setText(fact.firstChild, facts[index][0]);
    setText(fact.lastChild, worker.ready ? String(facts[index][1]) : "–");
  });
  showKv(find(".kv-bar"), find(".kv-text"), worker);
}

function showKv(bar, text, worker) {
  const blocks = { ...worker.blocks, held: worker.blocks.held + worker.blocks.in_flight };
  const total = worker.num_blocks;
  KV.forEach(([state], index) => {
    bar.children[index].style.flexGrow = total ? blocks[state] : 0;
  });
  const told = KV.map(([state, word]) => `${count(blocks[state])} ${word}`).join(", ");
  bar.setAttribute("aria-label", `KV blocks of ${worker.name}: ${told}`);
  const nbytes = (blocks.held + blocks.promised) * worker.block_size * worker.kv_token_nbytes;
  setText(text, total ? `${count(blocks.held)} of ${count(total)} blocks · ${bytes(nbytes)}` : "KV unknown");
}
