// What both pages share: elements and tables, asking Python, the address, the theme. A page draws what Python answers.

export const $ = (id) => document.getElementById(id);
export const start = JSON.parse($("start").textContent); // { page, mode, answer, and what is the same in every state }
export let answer = start.answer;

// ----------------------------------------------------------------------------------------------- elements and tables

export function element(tag, attributes = {}, ...children) {
  const svg = ["g", "path", "rect", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name === "onclick") node.addEventListener("click", value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// A table of texts and elements; the first cell of a row is its header. `classes` are the classes of the columns, `here`
// says which row is in focus, and `choose` is called with the number of a row whose header is pressed.
export function table(id, head, rows, { classes = [], here = () => false, choose = null } = {}) {
  const focused = [...$(id).querySelectorAll("button")].indexOf(document.activeElement);
  const header = (cell, i) => (choose ? element("button", { type: "button", onclick: () => choose(i) }, cell) : cell);
  const columns = head.map((text, i) => element("th", { scope: "col", class: classes[i] === "words" ? null : classes[i] ?? null }, text));
  $(id).replaceChildren(
    element("thead", {}, element("tr", {}, ...columns)),
    element("tbody", {}, ...rows.map(([first, ...cells], i) => element("tr", { "aria-current": here(i) && "true" },
      element("th", { scope: "row" }, header(first, i)),
      ...cells.map((cell, j) => element("td", { class: classes[j + 1] ?? null }, cell))))),
  );
  if (focused >= 0) $(id).querySelectorAll("button")[focused]?.focus();
}

export const paragraphs = (id, texts) => $(id).replaceChildren(...texts.map((text) => element("p", {}, text)));

// ------------------------------------------------------------------------------------------------------ asking Python

const LOADING = 180_000; // milliseconds until Python must have been loaded, on a slow line
const ANSWERING = 20_000;
let worker = null;
let loaded = start.mode === "local";
let timer = 0;

// Python in the browser, for the site. It is started by the first question that has no answer here.
function python(request) {
  return new Promise((resolve, reject) => {
    const fail = (reason) => {
      worker?.terminate();
      worker = null;
      loaded = false;
      reject(new Error(`${reason}. In a terminal: ${answer.command}`));
    };
    const limit = (milliseconds, what) => {
      clearTimeout(timer);
      timer = setTimeout(() => fail(`${what} takes more than ${milliseconds / 1000} seconds`), milliseconds);
    };
    if (!("WebAssembly" in globalThis)) return fail("This browser has no WebAssembly");
    if (location.protocol === "file:") return fail("Browsers load no Python from a file");
    limit(loaded ? ANSWERING : LOADING, loaded ? "The answer" : "Loading Python");
    worker ??= new Worker(new URL("worker.mjs", location.href), { type: "module" });
    worker.onerror = (event) => fail(`Python was not loaded: ${event.message ?? "worker.mjs is missing"}`);
    worker.onmessage = ({ data }) => {
      if (data.failure) return fail(data.failure);
      loaded = true;
      if (data.loaded) return limit(ANSWERING, "The answer");
      clearTimeout(timer);
      return resolve(JSON.parse(data.answer));
    };
    return worker.postMessage(request);
  });
}

// Answers that were computed when the site was built, by the state as JSON.
let common = null;
async function prepared(state) {
  common ??= fetch(`${start.page}_answers.json.gz`)
    .then((reply) => (reply.ok ? new Response(reply.body.pipeThrough(new DecompressionStream("gzip"))).json() : {}))
    .catch(() => ({}));
  return (await common)[JSON.stringify(Object.entries(state).sort())];
}

async function ask({ state, move = {}, next = null }) {
  const request = JSON.stringify({ page: start.page, state, move });
  if (start.mode === "file") throw new Error(`This file has one answer. For others: ${answer.command}`);
  if (start.mode === "site") return (next && (await prepared(next))) || python(request);
  const reply = await fetch("answer", { method: "POST", headers: { "Content-Type": "application/json" }, body: request }).catch(() => null);
  if (!reply) throw new Error("halfstep was stopped in its terminal: start it again, and open the address that it prints");
  if (!reply.ok) throw new Error(`halfstep refused: ${(await reply.text()).slice(0, 300)}`);
  return reply.json();
}

// -------------------------------------------------------------------------------------------------- state and address

let drawAnswer = () => {};
let theme = null;
let address = 0;
let asked = Promise.resolve();
let typing = 0;

const written = () => `#${new URLSearchParams({ ...answer.state, ...(theme ? { theme } : {}) })}`;
function show(reply) {
  if (reply.refused) throw new Error(reply.refused);
  answer = reply;
  $("error").textContent = answer.error;
  $("command").textContent = answer.command;
  drawAnswer();
}

// Asks the question that `question` makes of the answer that is shown: { state, move, next }, with `next` the state in
// which the move ends if no rule of Python changes more. Questions are answered in their order.
export function change(question) {
  clearTimeout(typing);
  asked = asked.then(async () => {
    const busy = setTimeout(() => {
      $("status").textContent = loaded ? "Python computes…" : "Loading Python, some 6 MB the first time…";
      document.querySelector("main").ariaBusy = "true";
    }, 150);
    try {
      show(await ask(question()));
      $("status").textContent = "";
      clearTimeout(address); // browsers refuse to write the address many times in a second
      address = setTimeout(() => history.replaceState(null, "", written()), 200);
    } catch (error) {
      $("status").textContent = error.message;
      drawAnswer();
    } finally {
      clearTimeout(busy);
      document.querySelector("main").ariaBusy = "false";
    }
  });
  return asked;
}

// As `change`, when nothing more has been typed for a moment.
export function typed(question) {
  clearTimeout(typing);
  typing = setTimeout(() => change(question), 150);
}

function fromAddress() {
  const { theme: name = theme, ...state } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  setTheme(name);
  if (Object.keys(state).length) change(() => ({ state, next: state }));
}

function setTheme(name) {
  theme = ["dark", "light"].includes(name) ? name : null;
  if (theme) document.documentElement.dataset.theme = theme;
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    $("status").textContent = `${what} copied.`;
  } catch {
    $("status").textContent = `The browser does not allow copying; select the text: ${text}`;
  }
}

export function run(how) {
  drawAnswer = how;
  show(start.answer);
  $("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme === "dark" || (!theme && matchMedia("(prefers-color-scheme: dark)").matches);
    setTheme(dark ? "light" : "dark");
    history.replaceState(null, "", written());
  });
  $("copy").addEventListener("click", () => copy(answer.command, "Command"));
  $("link").hidden = start.mode !== "site"; // elsewhere, the address is this machine's
  $("link").addEventListener("click", () => copy(location.href, "Link"));
  addEventListener("hashchange", () => {
    document.activeElement.blur(); // the field that is typed in would keep its text
    fromAddress();
  });
  fromAddress();
}
