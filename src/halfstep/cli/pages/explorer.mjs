// The explorer of formats: fields and bits ask, and the answer is drawn.
import { $, answer, change, element, paragraphs, run, start, table, typed } from "./common.mjs";

const FIELDS = ["x", "f", "c", "r", "o", "n", "s", "g"];
const CELLS = ["Stored", "Code", "Error, ulps", "Outcome"];
const opened = new Set(); // facts whose long texts are shown whole

function drawFields() {
  for (const id of FIELDS) if (document.activeElement !== $(id) || $(id).tagName === "SELECT") $(id).value = answer.fields[id] ?? "";
}

function drawBits(fields) {
  const focused = document.activeElement.dataset?.bit;
  let at = fields.reduce((count, [, bits]) => count + bits.length, 0);
  const button = (name, bit) => {
    at -= 1;
    return element("button", { type: "button", "data-bit": at, tabindex: -1, "aria-label": `${name} bit ${at}: ${bit}` }, bit);
  };
  $("bits").replaceChildren(...fields.map(([name, bits, label]) => element("div", { class: name }, element("span", {}, label),
    element("div", {}, ...[...bits].map((bit) => button(name, bit))))));
  const again = $("bits").querySelector(`[data-bit="${focused}"]`);
  (again ?? $("bits").querySelector("button")).tabIndex = 0;
  again?.focus();
}

function drawLine(line) {
  $("line").hidden = !line;
  if (!line) return;
  const mark = (tag, percent, style) => element(tag, { class: style, style: { left: `${percent}%` } });
  $("line").replaceChildren(
    element("div", { class: "ends" }, ...line.ends.map(([value, code]) => element("span", {}, `${value}\n${code}`))),
    element("div", { class: "track" }, mark("i", 50, "half"), ...line.taken.map((taken, i) => mark("i", 100 * i, taken ? "taken" : "")), mark("b", line.at, "")),
    element("div", { class: "below" }, line.label),
  );
}

function fact([term, text]) {
  if (text.length <= 100) return [element("dt", {}, term), element("dd", {}, text)];
  const summary = element("summary", {}, `${text.slice(0, 30)}…, ${text.length} characters`);
  const details = element("details", opened.has(term) ? { open: "" } : {}, summary, text);
  details.addEventListener("toggle", () => (details.open ? opened.add(term) : opened.delete(term)));
  return [element("dt", {}, term), element("dd", {}, details)];
}

// Heights over exponents as steps. 0 numbers lie on the axis.
function drawDensity(runs, names) {
  const width = Math.max(280, Math.min(704, $("density").parentElement.clientWidth || 704));
  const [left, right, top, bottom] = [40, width - 24, 10, 172];
  const [first, last] = [runs[0][0], runs.at(-1)[1]];
  const most = Math.max(...runs.flatMap(([, , ...heights]) => heights));
  const x = (exponent) => left + ((right - left) * (exponent - first)) / (last - first);
  const y = (height) => bottom - ((bottom - top) * height) / most;
  const path = (i) => `M${left} ${bottom}${runs.map((run) => `L${x(run[0])} ${y(run[2 + i])}H${x(run[1])}`).join("")}V${bottom}`;
  const label = (across, down, anchor, text) => element("text", { x: across, y: down, "text-anchor": anchor }, text);
  const marks = [];
  const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((step) => ((last - first) / step) * 72 <= width);
  for (let e = Math.ceil(first / every) * every; e <= last; e += every) marks.push(label(x(e), bottom + 16, "middle", `2^${e}`));
  for (let n = 0; n < most; n += Math.ceil(most / 5)) marks.push(label(left - 6, y(n + 1) + 4, "end", n ? `2^${n}` : "1"));
  $("density").setAttribute("viewBox", `0 0 ${width} 200`);
  $("density").replaceChildren(element("path", { d: `M${left} ${top}V${bottom}H${right}` }), ...marks,
    element("path", { d: path(0), class: "first" }), element("path", { d: path(1), class: "second" }));
  $("density-key").replaceChildren(...names.map((name) => element("span", {}, name)));
}

function drawPair(pair) {
  $("pair").hidden = !pair;
  if (!pair) return;
  $("pair-title").textContent = pair.title;
  $("pair-error").textContent = pair.error ?? "";
  $("pair-results").hidden = "error" in pair;
  if ("error" in pair) return;
  paragraphs("pair-words", pair.words);
  table("figures", ["Property", ...pair.names], pair.figures);
  $("around-section").hidden = !pair.around;
  if (pair.around) {
    $("around-title").textContent = pair.around.title;
    const { rows, here } = pair.around;
    table("around", ["Number", "Which has it", ...pair.names.map((name) => `Code in ${name}`)], rows, { here: (i) => rows[i][0] === here });
  }
  table("binades", ["From", "Up to", ...pair.names, "both"], pair.binades);
  drawDensity(pair.heights, pair.names);
}

function draw() {
  const { chosen, all, pair } = answer;
  drawFields();
  for (const [id, shown] of [["chosen", chosen], ["every", all]]) $(id).hidden = !shown;
  if (chosen) {
    $("title").textContent = chosen.title;
    drawBits(chosen.bits);
    drawLine(chosen.line);
    paragraphs("why", chosen.why);
    $("facts").replaceChildren(...chosen.facts.flatMap(fact));
    table("modes", ["Rounding", ...CELLS], chosen.modes.rows, { here: (i) => chosen.modes.rows[i][0] === chosen.modes.here });
  }
  if (all) {
    const choose = (i) => edit("f", all.rows[i][0]);
    table("all", ["Format", ...CELLS], all.rows, { choose, here: (i) => all.rows[i][0] === all.here });
  }
  drawPair(pair);
}

// A number or a code: the other one leaves the state. The value of a code stays when the format changes.
function edit(id, value, ask = change) {
  ask(() => {
    const next = { ...answer.state, [id]: value };
    if (id === "x" || (id === "c" && !value) || (id === "f" && next.c)) {
      next.x = id === "x" ? value : answer.fields.x;
      delete next.c;
    } else if (id === "c") delete next.x;
    return { state: next, next };
  });
}
const move = (how) => change(() => ({ state: answer.state, move: how }));

$("names").replaceChildren(...start.formats.map(([name, title]) => new Option(title, name)));
for (const [id, choices] of Object.entries(start.choices)) $(id).replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
for (const id of FIELDS) {
  $(id).addEventListener("input", () => edit(id, $(id).value, $(id).tagName === "SELECT" ? change : typed));
  $(id).addEventListener("blur", () => setTimeout(drawFields, 200)); // after what was typed last has been asked
}
$("fields").addEventListener("submit", (event) => event.preventDefault());
$("previous").addEventListener("click", () => move({ step: -1 }));
$("next").addEventListener("click", () => move({ step: 1 }));

function focusBit(i) {
  const all = [...$("bits").querySelectorAll("button")];
  const button = all[Math.max(0, Math.min(all.length - 1, i))];
  for (const each of all) each.tabIndex = each === button ? 0 : -1;
  button.focus();
}
$("bits").addEventListener("click", ({ target }) => {
  if (!target.dataset.bit) return;
  focusBit([...$("bits").querySelectorAll("button")].indexOf(target));
  move({ flip: Number(target.dataset.bit) });
});
$("bits").addEventListener("keydown", (event) => {
  const all = [...$("bits").querySelectorAll("button")];
  const at = all.indexOf(document.activeElement);
  const bit = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
  const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (event.altKey || event.ctrlKey || event.metaKey || (bit === undefined && !step)) return;
  event.preventDefault();
  if (step) move({ step });
  else focusBit(bit);
});
addEventListener("resize", () => answer.pair?.heights && drawDensity(answer.pair.heights, answer.pair.names));

run(draw);
