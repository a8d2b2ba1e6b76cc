// Puts the parts together. Each part owns one region of the page and is told what it shows.

import { key } from "./api.js";
import { Chat } from "./chat.js";
import { Detail } from "./detail.js";
import { announce, byId, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { Latency } from "./latency.js";
import { Notices } from "./notices.js";
import { Relay } from "./relay.js";
import { Requests } from "./requests.js";

const LINK = {
  connecting: "Connecting",
  live: "Live",
  away: "Reconnecting",
  locked: "Key needed",
  full: "Too many viewers",
  tenant: "Chat only",
};

const feed = new Feed();
const notices = new Notices();
const relay = new Relay();
const latency = new Latency();
const detail = new Detail();
const requests = new Requests((id) => detail.open(id));
const chat = new Chat((id) => detail.open(id));

let link = "connecting";
let startedAt = null;

feed.addEventListener("state", ({ detail: { state, detail: why } }) => {
  if (state === link) return;
  const before = link;
  link = state;
  byId("link").dataset.state = state;
  setText(byId("link-text"), LINK[state]);
  document.body.dataset.link = state;
  notices.link(state, why);
  chat.onEnd = state === "tenant" ? () => requests.load() : null;
  if (state === "tenant") requests.load();
  if (state === "live" && before === "away") announce("The router is back.");
});
feed.addEventListener("cluster", ({ detail: cluster }) => {
  if (startedAt !== null && startedAt !== cluster.started_at) notices.restarted();
  startedAt = cluster.started_at;
  setText(byId("model"), cluster.model);
  document.title = `Baton · ${cluster.model}`;
  chat.model = cluster.model;
  notices.cluster(cluster);
  relay.show(cluster);
});
feed.addEventListener("requests", ({ detail: lines }) => requests.show(lines));
feed.addEventListener("latency", ({ detail: told }) => latency.show(told));

const keyDialog = byId("key");
byId("key-open").addEventListener("click", () => {
  byId("key-input").value = key.get();
  keyDialog.showModal();
});
byId("key-forget").addEventListener("click", () => {
  byId("key-input").value = "";
  keyDialog.close();
  useKey();
});
byId("key-form").addEventListener("submit", useKey);

function useKey() {
  key.set(byId("key-input").value.trim());
  feed.retry();
}

document.addEventListener("key-needed", () => notices.keyNeeded(() => byId("key-open").click()));

const asked = /^#request=([0-9a-f]{32})$/.exec(location.hash);
if (asked) detail.open(asked[1]);
feed.start();
