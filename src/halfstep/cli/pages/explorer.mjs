// The explorer of formats: fields and bits ask, and the answer is drawn.
import { $, answer, change, copy, element, paragraphs, run, start, table, typed } from "./common.mjs";

const FIELDS = ["x", "f", "c", "r", "o", "n", "s", "g", "b", "k"];
const CELLS = ["Stored", "Code", "Error, ulps", "Outcome"];
const bits = () => [...$("bits").querySelectorAll("button")];

function drawFields() {
  for (const id of FIELDS) if (document.activeElement !== $(id) || $(id).tagName === "SELECT") $(id).value = answer.fields[id] ?? "";
}

function drawBits(fields) {
  const shape = fields.map(([name, bits, number]) => `${name}${bits.length}${number && ","}`).join();
  if ($("bits").dataset.shape !== shape) { // of another format
    let at = fields.reduce((count, [, bits]) => count + bits.length, 0);
    const button = () => element("button", { type: "button", "data-bit": (at -= 1), tabindex: -1 });
    $("bits").replaceChildren(...fields.map(([name, bits, number]) => element("div", { class: name },
      number ? element("label", {}, `${name} `, element("input", { "data-field": name, size: number.length + (name !== "sign"), autocomplete: "off" })) : element("span", {}, name),
      element("div", {}, ...[...bits].map(button)))));
    $("bits").dataset.shape = shape;
    bits()[0].tabIndex = 0;
  }
  const digits = fields.flatMap(([name, texts]) => [...texts].map((digit) => [name, digit]));
  bits().forEach((each, i) => {
    each.textContent = digits[i][1];
    each.ariaLabel = `${digits[i][0]} bit ${each.dataset.bit}: ${digits[i][1]}`;
  });
  for (const input of $("bits").querySelectorAll("input")) {
    if (input !== document.activeElement) input.value = fields.find(([name]) => name === input.dataset.field)[2];
  }
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

const label = (across, down, anchor, text) => element("text", { x: across, y: down, "text-anchor": anchor }, text);
const widthOf = (id) => Math.max(280, Math.min(704, $(id).parentElement.clientWidth || 704));

// A bar for each format, from its least number to its largest, and a line where the number lies.
function drawRange({ at, rows, ticks, words }, here) {
  const [left, right, row] = [84, widthOf("range") - 22, 17];
  const bottom = row * rows.length + 4;
  const x = (percent) => left + ((right - left) * percent) / 100;
  const zone = (name, from, to, y, height) => element("rect", { class: name, x: x(from), y, width: x(to) - x(from), height });
  $("range").setAttribute("viewBox", `0 0 ${right + 22} ${bottom + 18}`);
  $("range").replaceChildren(
    ...rows.map(([name, least, normal, most, limits], i) => element("g", name === here ? { class: "here" } : {},
      element("title", {}, `${name}: ${limits}`), label(left - 6, row * i + 13, "end", name),
      zone("below", 0, least, row * i + 7, 3), zone("subnormal", least, normal, row * i + 2, 13),
      zone("normal", normal, most, row * i + 2, 13), zone("overflow", most, 100, row * i + 7, 3))),
    ...ticks.map(([percent, text]) => label(x(percent), bottom + 13, "middle", text)),
    ...(at === null ? [] : [element("path", { class: "at", d: `M${x(at)} 0V${bottom}` })]));
  $("range-words").textContent = words;
}

// Heights over exponents as steps. 0 numbers lie on the axis.
function drawDensity(runs, names) {
  const width = widthOf("density");
  const [left, right, top, bottom] = [40, width - 24, 10, 172];
  const [first, last] = [runs[0][0], runs.at(-1)[1]];
  const most = Math.max(...runs.flatMap(([, , ...heights]) => heights));
  const x = (exponent) => left + ((right - left) * (exponent - first)) / (last - first);
  const y = (height) => bottom - ((bottom - top) * height) / most;
  const path = (i) => `M${left} ${bottom}${runs.map((run) => `L${x(run[0])} ${y(run[2 + i])}H${x(run[1])}`).join("")}V${bottom}`;
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

// Numbers that share a scale. The row of the number that decides it is marked.
function drawBlock(block) {
  $("block-error").textContent = block.error ?? "";
  $("block-results").hidden = "error" in block;
  if ("error" in block) return;
  $("block-title").textContent = block.title;
  paragraphs("block-words", block.words);
  for (const id of ["elements", "rules"]) {
    const [head, rows, marked] = block[id];
    table(id, head, rows, { here: (i) => i === marked });
  }
  $("rules-part").hidden = !block.rules[1].length;
}

function draw() {
  const { chosen, all, pair } = answer;
  drawFields();
  for (const [id, shown] of [["chosen", chosen], ["every", all]]) $(id).hidden = !shown;
  if (chosen) {
    [$("value").textContent, $("digits").hidden] = [chosen.value[0], !chosen.value[1]];
    $("title").textContent = chosen.title;
    drawBits(chosen.bits);
    drawLine(chosen.line);
    paragraphs("why", chosen.why);
    $("facts").replaceChildren(...chosen.facts.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]));
    table("modes", ["Rounding", ...CELLS], chosen.modes.rows, { here: (i) => chosen.modes.rows[i][0] === chosen.modes.here });
  }
  if (all) {
    const choose = (i) => edit("f", all.rows[i][0]);
    table("all", ["Format", ...CELLS], all.rows, { choose, here: (i) => all.rows[i][0] === all.here });
    drawRange(all.range, all.here);
  }
  drawPair(pair);
  drawBlock(answer.block);
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
for (const id of ["fields", "block-fields"]) $(id).addEventListener("submit", (event) => event.preventDefault());
$("previous").addEventListener("click", () => move({ step: -1 }));
$("next").addEventListener("click", () => move({ step: 1 }));

$("digits").addEventListener("click", () => copy(answer.chosen.value[1], "All digits"));

function focusBit(button) {
  for (const each of bits()) each.tabIndex = each === button ? 0 : -1;
  button.focus();
}

let drag = null; // { to, last }: pressing a bit flips it, and dragging gives the bits on the way the same digit
function dragTo(bit) {
  while (drag.last !== bit) {
    drag.last = drag.last === null ? bit : drag.last + Math.sign(bit - drag.last);
    move({ flip: drag.last, to: drag.to });
  }
  focusBit($("bits").querySelector(`[data-bit="${bit}"]`));
}
$("bits").addEventListener("pointerdown", (event) => {
  if (!event.target.dataset.bit || event.button) return;
  drag = { to: 1 - Number(event.target.textContent), last: null };
  dragTo(Number(event.target.dataset.bit));
});
$("bits").addEventListener("pointermove", ({ clientX, clientY }) => {
  const bit = drag && document.elementFromPoint(clientX, clientY)?.dataset.bit;
  if (bit) dragTo(Number(bit));
});
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(() => { drag = null; })); // after the click
$("bits").addEventListener("click", ({ target }) => { // by a key, or by a program that reads the page aloud
  if (!target.dataset.bit || drag) return;
  focusBit(target);
  move({ flip: Number(target.dataset.bit) });
});
$("bits").addEventListener("input", ({ target }) => typed(() => ({ state: answer.state, move: { field: [target.dataset.field, target.value] } })));
$("bits").addEventListener("blur", () => setTimeout(() => answer.chosen && drawBits(answer.chosen.bits), 200), true);
$("bits").addEventListener("keydown", (event) => {
  const all = bits();
  const at = all.indexOf(event.target);
  const bit = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
  const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (at < 0 || event.altKey || event.ctrlKey || event.metaKey || (bit === undefined && !step)) return;
  event.preventDefault();
  if (step) move({ step });
  else focusBit(all[Math.max(0, Math.min(all.length - 1, bit))]);
});
addEventListener("resize", () => {
  if (answer.all) drawRange(answer.all.range, answer.all.here);
  if (answer.pair?.heights) drawDensity(answer.pair.heights, answer.pair.names);
});

run(draw);
