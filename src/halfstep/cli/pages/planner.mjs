// The planner: a form of the options of `halfstep plan`, and its answer drawn.
import { $, answer, change, element, paragraphs, run, table, typed } from "./common.mjs";

const lists = {}; // the choices of each select, as JSON
const colour = ([light, dark]) => ({ background: `light-dark(${light}, ${dark})` });

const go = (state) => change(() => ({ state, next: state }));

const set = (name, value, ask = change) => ask(() => {
  const next = { ...answer.state, [name]: value };
  if (value === null) delete next[name];
  return { state: next, next };
});

function field({ name, label, help, flag, wide, choices }) {
  const common = { id: `o-${name}`, title: help };
  const control = flag ? element("input", { ...common, type: "checkbox" })
    : choices ? element("select", common) : element("input", { ...common, autocomplete: "off", spellcheck: "false" });
  control.addEventListener("input", () => set(name, flag ? (control.checked ? "" : null) : control.value.trim() || null, flag || choices ? change : typed));
  return element("label", { class: flag ? "check" : wide && "wide" }, ...(flag ? [control, label] : [`${label} `, control]));
}

const option = ([value, text]) => new Option(text, value);

function drawField({ name, value, hidden, choices }) {
  const control = $(`o-${name}`);
  control.closest("label").hidden = hidden;
  if (control.type === "checkbox") control.checked = value;
  else if (choices) {
    if (lists[name] !== JSON.stringify(choices)) control.replaceChildren(...choices.map(option));
    lists[name] = JSON.stringify(choices);
    if (![...control.options].some((each) => each.value === value)) control.append(new Option(value, value));
    control.value = value;
  } else if (control !== document.activeElement) control.value = value;
}

const bar = ({ parts, marks }) => element("div", { class: "bar", "aria-hidden": "true" },
  ...parts.map(([light, dark, percent]) => element("i", { style: { ...colour([light, dark]), width: `${percent}%` } })),
  ...marks.map(([percent, usable]) => element("b", { class: usable ? "usable" : "", style: { left: `${percent}%` } })));

// A link to the plan with these changes, and what they cost.
function way({ words, peak, costs, state }) {
  const options = words.split(/ (?=--|\()/).flatMap((option, i) => [i ? " " : "", element("code", {}, option)]);
  return element("li", {}, element("a", { href: `#${new URLSearchParams(state)}` }, ...options), ` ${peak}`,
    element("ul", {}, ...costs.map((cost) => element("li", {}, cost))));
}

function drawPlan({ verdict, headline, ways, fits, bar: large, scale, parts, sent, words }) {
  $("verdict").textContent = verdict;
  $("verdict").dataset.fits = fits;
  $("headline").textContent = headline;
  $("ways").replaceChildren(...ways.map(way));
  $("bar").replaceChildren(...bar(large).children);
  $("scale").textContent = scale;
  const key = (colours) => (colours.length ? [element("span", { class: "key", style: colour(colours) })] : []);
  const cells = ([name, ...texts]) => [element("span", {}, ...key(texts.slice(5)), name), ...texts.slice(0, 5)];
  table("parts", ["Part", "Per GPU", "B/param", "÷", "When", "Note"], parts.map(cells), { classes: ["", "number", "number", "number", "words", "words"] });
  $("silent").hidden = sent.length > 0;
  $("sent-scroll").hidden = !sent.length;
  table("sent", ["What", "In all", "Operation", "GPUs"], sent, { classes: ["", "number", "words", "number"] });
  paragraphs("words", words);
}

function drawComparison({ head = [], rows, note }) {
  const classes = head.map((text) => (text === "picture" ? "picture" : text === "fits" ? "" : "number"));
  classes[0] = "";
  const cells = ({ cells: texts, bar: small }) => texts.map((text, i) => (head[i] === "picture" ? bar(small) : text));
  table("comparison", head, rows.map(cells), { classes, here: (i) => rows[i].here, choose: (i) => go(rows[i].state) });
  [...$("comparison").tBodies[0].rows].forEach((row, i) => row.cells[0].append(bar(rows[i].bar))); // on a phone, instead of the column
  $("comparison").parentElement.hidden = !rows.length;
  $("comparison-note").textContent = note;
}

function draw() {
  for (const { fields } of answer.form) fields.forEach(drawField);
  $("compare").value = answer.compare;
  for (const id of ["peak", "details", "verdict", "headline"]) $(id).hidden = !answer.plan;
  $("fitting").hidden = !answer.plan?.ways.length;
  if (answer.plan) drawPlan(answer.plan);
  drawComparison(answer.comparison);
}

$("form").replaceChildren(...answer.form.map(({ title, fields }) =>
  element("fieldset", {}, element("legend", {}, title), element("div", { class: "fields" }, ...fields.map(field)))));
$("form").addEventListener("submit", (event) => event.preventDefault());
$("compare").replaceChildren(...["strategies", "layouts"].map((name) => new Option(name, name)));
$("compare").addEventListener("input", () => set("compare", $("compare").value === "strategies" ? null : $("compare").value));

run(draw);
