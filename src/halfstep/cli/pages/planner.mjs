// The planner: a form of the options of `halfstep plan`, and its answer drawn.
import { $, answer, change, element, paragraphs, run, start, table, typed } from "./common.mjs";

const lists = {}; // the choices of each select, as JSON
const colour = ([light, dark]) => ({ background: `light-dark(${light}, ${dark})` });
const wanted = () => ($("data").open ? { json: true } : {});

const go = (state) => change(() => ({ state, move: wanted(), next: state }));

// Python decides what else a change of an option changes.
const set = (name, value, ask = change) => ask(() => {
  const next = { ...answer.state, [name]: value };
  if (value === null) delete next[name];
  return { state: answer.state, move: { set: [name, value], ...wanted() }, next };
});

function field({ name, label, help, flag, wide }) {
  const { choices } = answer.controls[name];
  const common = { id: `o-${name}`, title: help };
  const control = flag ? element("input", { ...common, type: "checkbox" })
    : choices ? element("select", common) : element("input", { ...common, autocomplete: "off", spellcheck: "false" });
  control.addEventListener("input", () => set(name, flag ? (control.checked ? "" : null) : control.value.trim() || null, flag || choices ? change : typed));
  return element("label", { class: flag ? "check" : wide && "wide" }, ...(flag ? [control, label] : [`${label} `, control]));
}

const option = ([value, text]) => (Array.isArray(text) ? element("optgroup", { label: value }, ...text.map(option)) : new Option(text, value));

function drawControl([name, { value, hidden, choices, placeholder, fixed }]) {
  const control = $(`o-${name}`);
  control.closest("label").hidden = hidden;
  if (control.type === "checkbox") [control.checked, control.disabled] = [value, fixed];
  else if (choices) {
    if (lists[name] !== JSON.stringify(choices)) control.replaceChildren(...choices.map(option));
    lists[name] = JSON.stringify(choices);
    if (![...control.options].some((each) => each.value === value)) control.append(new Option(value, value));
    control.value = value;
  } else {
    control.placeholder = placeholder;
    if (control !== document.activeElement) control.value = value;
  }
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

function drawPlan({ verdict, headline, ways, fits, figures, bar: large, scale, memory, parts, sent, words }) {
  $("verdict").textContent = verdict;
  $("verdict").dataset.fits = fits;
  $("headline").textContent = headline;
  $("ways").replaceChildren(...ways.map(way));
  $("figures").replaceChildren(...figures.map(([name, value, note]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("span", {}, note)))));
  $("bar").replaceChildren(...bar(large).children);
  $("scale").textContent = scale;
  const key = (colours) => (colours.length ? [element("span", { class: "key", style: colour(colours) })] : []);
  table("memory", ["Kind", "Bytes", "Share"], memory.map(([name, bytes, share, ...colours]) => [element("span", {}, ...key(colours), name), bytes, share]), { classes: ["", "number", "number"] });
  table("parts", ["Part", "Per GPU", "B/param", "÷", "When", "Note"], parts, { classes: ["", "number", "number", "number", "words", "words"] });
  $("silent").hidden = sent.length > 0;
  $("sent-scroll").hidden = !sent.length;
  table("sent", ["What", "In all", "Operation", "GPUs", "Times", "B/param"], sent, { classes: ["", "number", "words", "number", "number", "number"] });
  paragraphs("words", words);
}

function drawComparison({ head = [], rows, note }) {
  const classes = head.map((text) => (text === "Picture" ? "picture" : text === "Fits" ? "" : "number"));
  classes[0] = "";
  const cells = ({ cells: texts, bar: small }) => texts.map((text, i) => (head[i] === "Picture" ? bar(small) : text));
  table("comparison", head, rows.map(cells), { classes, here: (i) => rows[i].here, choose: (i) => go(rows[i].state) });
  [...$("comparison").tBodies[0].rows].forEach((row, i) => row.cells[0].append(bar(rows[i].bar))); // on a phone, instead of the column
  $("comparison").parentElement.hidden = !rows.length;
  $("comparison-note").textContent = note;
}

function draw() {
  Object.entries(answer.controls).forEach(drawControl);
  $("compare").value = answer.compare;
  for (const id of ["peak", "details", "verdict", "headline"]) $(id).hidden = !answer.plan;
  $("fitting").hidden = !answer.plan?.ways.length;
  if (answer.plan) drawPlan(answer.plan);
  drawComparison(answer.comparison);
  $("json").textContent = answer.json ?? "";
}

$("form").replaceChildren(...start.form.map(({ title, fields, more }) => element("fieldset", {}, element("legend", {}, title),
  element("div", { class: "fields" }, ...fields.map(field)),
  element("details", more.some(({ name }) => name in answer.state) ? { open: "" } : {}, element("summary", {}, "More"),
    element("div", { class: "fields" }, ...more.map(field))))));
$("form").addEventListener("submit", (event) => event.preventDefault());
$("compare").replaceChildren(...["strategies", "layouts"].map((name) => new Option(name, name)));
$("compare").addEventListener("input", () => set("compare", $("compare").value));
$("data").addEventListener("toggle", () => $("data").open && !answer.json && change(() => ({ state: answer.state, move: { json: true } })));

run(draw);
