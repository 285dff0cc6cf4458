// The page: what is typed or clicked becomes the state, which is written to the address and shown.

const $ = (id) => document.getElementById(id);
// x: the number, or c: a code of the format f; g: the format compared; r, o, n, s: rounding, overflow, NaN, subnormals.
const DEFAULTS = { x: "0.1", c: "", f: "bf16", g: "fp16", r: "nearest", o: "inf", n: "canonical", s: "1", ...start };
const CHOICES = {
  r: roundingModes.filter((mode) => mode !== "stochastic"), o: overflowChoices, n: nanChoices, s: ["1", "0"],
};
const writtenWhole = (x) => (x.type === "finite" ? decimal(x) ?? `≈${rounded(x, 17)}` : specialText(x));
const state = {};

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [key, usual] of Object.entries(DEFAULTS)) {
    const text = given.get(key) ?? (key === "c" && given.has("x") ? "" : usual);
    state[key] = CHOICES[key] && !CHOICES[key].includes(text) ? usual : text;
  }
}

// Written after a pause: browsers refuse to write the address many times in a second.
let later = 0;
function toAddress() {
  clearTimeout(later);
  const chosen = Object.entries(state).filter(([key, text]) => (state.c ? key !== "x" : key !== "c") && text !== "");
  later = setTimeout(() => history.replaceState(null, "", `#${new URLSearchParams(chosen)}`), 200);
}

// ----------------------------------------------------------------------------------------------------------- elements

function make(name, text = "", properties = {}) {
  const element = Object.assign(document.createElement(name), properties);
  element.textContent = text;
  return element;
}

// Fills a table with rows of texts, the first of them headers. Elements stay, so that the focus does.
function fill(body, rows, choose = null) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach(({ cells, here = false, wide = -1 }, i) => {
    const line = body.rows[i] ?? body.insertRow();
    line.classList.toggle("here", here);
    if (here) line.setAttribute("aria-current", "true");
    else line.removeAttribute("aria-current");
    while (line.cells.length > cells.length) line.deleteCell(-1);
    cells.forEach((text, j) => {
      let cell = line.cells[j];
      if (!cell) {
        cell = line.appendChild(document.createElement(j ? "td" : "th"));
        if (!j) cell.scope = "row";
        if (!j && choose) {
          const button = cell.appendChild(make("button", "", { type: "button" }));
          button.addEventListener("click", () => choose(button.textContent));
        }
      }
      cell.classList.toggle("wide", j === wide);
      const place = cell.firstElementChild ?? cell;
      if (place.textContent !== text) place.textContent = text;
    });
  });
}

const fillHead = (head, names) => {
  head.replaceChildren(document.createElement("tr"));
  for (const name of names) {
    const cell = make(name ? "th" : "td", name);
    if (name) cell.scope = "col";
    head.firstChild.append(cell);
  }
};
const paragraphs = (place, texts) => place.replaceChildren(...texts.map((text) => make("p", text)));

// -------------------------------------------------------------------------------------------------------- one format

const optionsOf = () => ({ overflow: state.o, nan: state.n, subnormals: state.s === "1" });
const cut = (text, width) => (text.length > width ? `${text.slice(0, width - 1)}…` : text);

// The number that is typed, or the value of the code that is.
function given(f) {
  if (!state.c) return parseNumber(state.x);
  const text = state.c.replace(/_/g, "");
  if (!/^\s*(0x[0-9a-f]+|0b[01]+|[0-9]+)\s*$/i.test(text)) {
    throw new RangeError(`Expected a code such as 0x3dcd, 0b101 or 61, but got ${repr(state.c)}`);
  }
  return decode(BigInt(text), f);
}

// The result for a format. A code that was chosen stays: no rounding, no option and no canonical NaN changes it.
function result(number, f, rounding) {
  if (state.c && f.name === formatNamed(state.f).name) {
    const found = encoded(number, f, rounding, { ...optionsOf(), subnormals: true, nan: "canonical", overflow: "inf" });
    return { ...found, code: BigInt(state.c.replace(/_/g, "")), value: number, options: { subnormals: true } };
  }
  return encoded(number, f, rounding, optionsOf());
}

function resultRow(name, found, more = {}) {
  if (found.code === null) return { cells: [name, found.refusal, "", "", outcomeText(found)], wide: 1, ...more };
  const { code, f } = found;
  return { cells: [name, valueText(code, f, 20), codeText(code, f), ulpsText(found), outcomeText(found)], ...more };
}

function showBits(code, f) {
  const place = $("bits");
  const bits = code.toString(2).padStart(Number(f.bits), "0");
  if (place.dataset.format !== f.name) {
    place.dataset.format = f.name;
    let at = Number(f.bits);
    place.replaceChildren(...fieldsOf(code, f).map(([name, part]) => {
      const field = make("div", "", { className: "field" });
      const row = document.createElement("div");
      row.append(...[...part].map(() => {
        const button = make("button", "", { type: "button", className: name, tabIndex: -1 });
        button.dataset.bit = at -= 1;
        return button;
      }));
      field.append(make("span", name), row);
      return field;
    }));
    place.querySelector("button").tabIndex = 0;
  }
  const fields = fieldsOf(code, f);
  [...place.children].forEach((field, i) => {
    const [name, part] = fields[i];
    field.firstChild.textContent = name === "exponent" ? `exponent: ${BigInt(`0b${part}`)}`
      : name === "mantissa" && f.kind !== "integer" ? `mantissa: ${BigInt(`0b${part}`)}` : name;
  });
  for (const button of place.querySelectorAll("button")) {
    const bit = bits[bits.length - 1 - button.dataset.bit];
    if (button.textContent === bit) continue;
    button.textContent = bit;
    button.setAttribute("aria-label", `${button.className} bit ${button.dataset.bit}: ${bit}`);
  }
}

// The formula of a code's value, with its fields.
function formula(code, f) {
  const value = decode(code, f);
  const fields = Object.fromEntries(fieldsOf(code, f).map(([name, part]) => [name, BigInt(`0b${part}`)]));
  if (!isFinite(value)) return value.type === "nan" ? "the code of a NaN" : "the largest exponent, and mantissa 0";
  if (f.kind === "integer") return "two's complement";
  if (f.kind === "scale") return `2^(${code} − ${f.bias})`;
  const normal = fields.exponent > 0n;
  const fraction = f.m === 0n ? `${Number(normal)}` : `(${Number(normal)} + ${fields.mantissa}/2^${f.m})`;
  return `(−1)^${fields.sign} · 2^(${normal ? fields.exponent : 1n} − ${f.bias}) · ${fraction}`;
}

function showLine(found, number, f) {
  const place = $("line");
  const around = isFinite(number) ? neighbours(number, f) : null;
  const decided = ruleOf(number, f, around);
  place.hidden = true;
  if (!around || ["exact", "sign", "least"].includes(decided)) return;
  const [low, high] = endsAround(number, f, around.ulp);
  const inner = number.negative ? high : low;
  if (overflows(inner, f)) return;
  const held = (value) => {
    const one = encoded(value.type === "zero" ? zero(number.negative) : value, f);
    return one.outcome === "exact" ? one.code : null;
  };
  const side = (value) => {
    const code = held(value);
    const span = make("span", shown(value, f));
    span.append(document.createElement("br"), code === null ? `not in ${f.name}` : codeText(code, f));
    return span;
  };
  const share = over(minus(number, low), minus(high, low));
  const percent = Number((share.n * 1000000n) / share.d) / 10000;
  const at = (name, where, taken) => {
    const element = make(name, "", { className: taken });
    element.style.left = `${where}%`;
    return element;
  };
  const taken = (value) => (found.value && isFinite(found.value) && compare(found.value, value) === 0 ? "taken" : "");
  const track = make("div", "", { className: "track" });
  track.append(at("i", 50, "half"), at("i", 0, taken(low)), at("i", 100, taken(high)), at("b", percent, ""));
  const sides = make("div", "", { className: "ends" });
  sides.append(side(low), side(high));
  const middle = shown(times(plus(low, high), HALF), f);
  const where = `${cut(state.x.trim(), 24)} lies ${Number(percent.toFixed(2))} % of the way`;
  const below = make("div", `${where}; halfway is ${middle}`, { className: "below" });
  place.replaceChildren(sides, track, below);
  place.hidden = false;
}

function facts(number, found, f) {
  const { code, value } = found;
  const side = (step) => {
    const next = step === null ? null : decode(step, f);
    return next === null ? "none" : `${shown(next, f)} (${codeText(step, f)})`;
  };
  const lines = [
    ["format", `${f.name}: ${f.title}`], ["code", `${codeText(code, f)} = ${bitsText(code, f)}`],
    ["formula", formula(code, f)], ["exact value", writtenWhole(value)],
  ];
  if (value.type === "finite") {
    lines.push(["shortest", shortest(code, f)], ["hexadecimal", hexFloat(value)]);
    const { n, d } = reduced(value);
    const sign = value.negative ? "-" : "";
    lines.push(["fraction", d > 1n << 30n ? `${sign}${n}/2^${bitLength(d) - 1n}` : ratioText(value)]);
  }
  if (found.error) {
    const ulps = found.error.type === "zero" ? "" : ` = ${ulpsText(found)} ulp`;
    lines.push(["error", `${cut(writtenWhole(found.error), 60)}${ulps}`]);
  }
  if (isFinite(value)) lines.push(["ulp", power(ulp(value, f))]);
  lines.push(["previous", side(nextCode(value, f, -1n))], ["next", side(nextCode(value, f, 1n))]);
  lines.push(["class", classify(code, f)]);
  return lines;
}

const opened = new Set(); // facts whose long texts are shown whole
// Shows the number in one format; returns why the format refuses it, if it does.
function showOne(number, f) {
  const found = result(number, f, state.r);
  if (found.code === null) return found.refusal;
  const { code } = found;
  texts.c = codeText(code, f);
  const name = state.c ? codeText(code, f) : cut(state.x.trim(), 40);
  const error = ulpsText(found);
  $("answer").textContent = `${name} in ${f.name} is ${valueText(code, f, 24)}: ${outcomeText(found)}` +
    (error && error !== "0" ? `, ${error} ulp` : "");
  showBits(code, f);
  showLine(found, number, f);
  paragraphs($("why"), state.c && !isFinite(number) ? [`The code is that of ${specialText(number)}.`] : reasons(found));
  const pair = ([term, text]) => {
    const whole = make("dd", text.length > 100 ? "" : text);
    if (text.length > 100) {
      const details = whole.appendChild(make("details", "", { open: opened.has(term) }));
      details.append(make("summary", `${text.slice(0, 30)}…, ${text.length} characters`), text);
      details.addEventListener("toggle", () => (details.open ? opened.add(term) : opened.delete(term)));
    }
    return [make("dt", term), whole];
  };
  $("facts").replaceChildren(...facts(number, found, f).flatMap(pair));
  const stochastic = chances(number, f, optionsOf()).map(([share, one]) => {
    const error = one.error && isFinite(number) ? minus(one.value, number) : null;
    const { cells } = resultRow("stochastic", { ...one, number, error });
    return { cells: [...cells.slice(0, 4), `with ${rounded(times(share, finite(false, 100n)), 6)} %`] };
  });
  fill($("modes"), [...CHOICES.r.map((mode) => resultRow(mode, result(number, f, mode), { here: mode === state.r })),
    ...stochastic]);
  return "";
}

function showAll(number, f) {
  const others = Object.values(formats);
  const rows = others.some((each) => each.name === f.name) ? others : [f, ...others];
  const line = (each) => resultRow(each.name, result(number, each, state.r), { here: each.name === f.name });
  fill($("all"), rows.map(line), (name) => change({ f: name }));
}

// -------------------------------------------------------------------------------------------------------- two formats

let compared = "";
function showPair(number, f) {
  $("pair").hidden = !state.g.trim();
  if ($("pair").hidden) return;
  $("pair-error").textContent = "";
  $("pair-results").hidden = true;
  $("pair-title").textContent = "Two formats compared";
  const g = formatNamed(state.g);
  $("pair-title").textContent = `${f.name} and ${g.name}`;
  if (f.name === g.name) {
    $("pair-error").textContent = `Both are ${f.name}: choose another format under “Compare with”.`;
    return;
  }
  $("pair-results").hidden = false;
  if (compared !== `${f.name} ${g.name}`) {
    compared = `${f.name} ${g.name}`;
    paragraphs($("pair-words"), pairWords(f, g));
    fillHead($("figures-head"), ["Property", f.name, g.name]);
    const theirs = figures(g);
    fill($("figures"), figures(f).map(([name, text], i) => ({ cells: [name, text, theirs[i][1]] })));
    showDensity(f, g);
  }
  $("around-section").hidden = !number || !isFinite(number);
  if ($("around-section").hidden) return;
  $("around-title").textContent = `Numbers around ${state.c ? shown(number, f) : cut(state.x.trim(), 40)}`;
  fillHead($("around-head"), ["Number", "Which has it", `Code in ${f.name}`, `Code in ${g.name}`]);
  const rows = valuesAround(number, f, g).map(({ value, codes }) => {
    const held = [f, g].filter((_, i) => codes[i] !== null).map((each) => each.name);
    const texts = [f, g].map((each, i) => (codes[i] === null ? "-" : codeText(codes[i], each)));
    const whole = value.type === "finite" ? decimal(value) : "0";
    const text = whole.length <= 24 ? whole : `≈${rounded(value, Math.max(maxDigits10(f), maxDigits10(g)) + 2)}`;
    return { value, cells: [text, held.length === 2 ? "both" : `only ${held[0]}`, ...texts] };
  });
  const at = rows.findIndex(({ value }) => compare(value, number) >= 0);
  const exact = at >= 0 && compare(rows[at].value, number) === 0;
  if (exact) rows[at].here = true;
  else {
    const stored = [f, g].map((each) => result(number, each, state.r))
      .map((one) => (one.code === null ? "refused" : `→ ${valueText(one.code, one.f, 20)}`));
    const cells = [cut(state.x.trim(), 24), "neither", ...stored];
    rows.splice(at < 0 ? rows.length : at, 0, { cells, here: true });
  }
  fill($("around"), rows);
}

function svg(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

// The bits of precision over the exponents: numbers per binade as steps, on a scale of powers of two.
function showDensity(f, g) {
  const runs = binades(f, g);
  const width = Math.max(280, Math.min(704, $("density").parentElement.clientWidth));
  const [left, right, top, bottom] = [40, width - 24, 10, 172];
  $("density").setAttribute("viewBox", `0 0 ${width} 200`);
  const [first, last] = [Number(runs[0].from), Number(runs.at(-1).to) + 1];
  const most = Math.max(...runs.flatMap(({ counts }) => counts.slice(0, 2).map((n) => Number(bitLength(n)))));
  const x = (exponent) => left + ((right - left) * (exponent - first)) / (last - first);
  // 0 numbers lie on the axis, 1 one step above it.
  const y = (count) => bottom - (bottom - top) * (count ? (Math.log2(Number(count)) + 1) / most : 0);
  const path = (i) => {
    const parts = runs.map(({ from, to, counts }) => `L${x(Number(from))} ${y(counts[i])}H${x(Number(to) + 1)}`);
    return `M${left} ${bottom}${parts.join("")}V${bottom}`;
  };
  const elements = [svg("path", { d: `M${left} ${top}V${bottom}H${right}`, class: "axis" })];
  const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((step) => ((last - first) / step) * 72 <= width);
  for (let e = Math.ceil(first / every) * every; e <= last; e += every) {
    elements.push(svg("text", { x: x(e), y: bottom + 16, "text-anchor": "middle" }, `2^${e}`));
  }
  const up = Math.ceil(most / 5);
  for (let bits = 0; bits < most; bits += up) {
    elements.push(svg("text", { x: left - 6, y: y(2 ** bits) + 4, "text-anchor": "end" }, bits ? `2^${bits}` : "1"));
  }
  elements.push(svg("path", { d: path(0), class: "one" }), svg("path", { d: path(1), class: "other" }));
  $("density").replaceChildren(...elements);
  $("density-key").replaceChildren(make("span", f.name), make("span", g.name));
  fillHead($("binades-head"), ["From", "Up to", f.name, g.name, "both"]);
  const count = (n) => (n > 1000000n && !(n & (n - 1n)) ? `2^${bitLength(n) - 1n}` : grouped(n));
  const line = ({ from, to, counts }) => ({ cells: [`2^${from}`, `2^${to + 1n}`, ...counts.map(count)] });
  fill($("binades"), runs.map(line));
}

// ---------------------------------------------------------------------------------------------------------- together

// The texts of the fields. The one that is typed in keeps its text until it is left.
const texts = {};
function showFields() {
  for (const [id, text] of Object.entries(texts)) if (document.activeElement !== $(id)) $(id).value = text;
}

function show() {
  toAddress();
  Object.assign(texts, state);
  let [number, f] = [null, null];
  try {
    f = formatNamed(state.f);
    number = given(f);
    if (state.c) texts.x = writtenWhole(number);
    showAll(number, f);
    const refusal = showOne(number, f);
    $("error").textContent = refusal;
    $("one").hidden = refusal !== "";
    $("results").hidden = false;
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    $("error").textContent = error.message;
    $("results").hidden = true;
  }
  showFields();
  try {
    if (f) showPair(number, f);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    $("pair-error").textContent = error.message;
  }
}

function change(changed) {
  if (state.c && "f" in changed) {
    try {
      Object.assign(state, { x: writtenWhole(given(formatNamed(state.f))), c: "" });
    } catch {
      Object.assign(state, { c: "" });
    }
  }
  if ("x" in changed) state.c = "";
  Object.assign(state, changed);
  show();
}

const current = () => {
  const f = formatNamed(state.f);
  return [result(given(f), f, state.r).code, f];
};
function flip(bit) {
  const [code, f] = current();
  change({ c: codeText(code ^ (1n << BigInt(bit)), f) });
}
// To the next number of the format; among the codes of NaN to the next code.
function step(way) {
  const [code, f] = current();
  const next = nextCode(decode(code, f), f, way);
  const size = 1n << f.bits;
  change({ c: codeText(next ?? (code + way + size) % size, f) });
}

for (const [id, names] of Object.entries(CHOICES)) {
  if (id !== "s") $(id).replaceChildren(...names.map((name) => new Option(name, name)));
}
$("names").replaceChildren(...Object.values(formats).map((f) => new Option(f.title, f.name)));
for (const id of ["x", "f", "g", "c", "r", "o", "n", "s"]) {
  $(id).addEventListener("input", () => change({ [id]: $(id).value }));
  $(id).addEventListener("blur", showFields);
}
$("fields").addEventListener("submit", (event) => event.preventDefault());
$("previous").addEventListener("click", () => step(-1n));
$("next").addEventListener("click", () => step(1n));

const buttons = () => [...$("bits").querySelectorAll("button")];
function focusBit(place) {
  const all = buttons();
  const button = all[Math.max(0, Math.min(all.length - 1, place))];
  for (const each of all) each.tabIndex = each === button ? 0 : -1;
  button.focus();
}
$("bits").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  focusBit(buttons().indexOf(button));
  flip(button.dataset.bit);
});
$("bits").addEventListener("keydown", (event) => {
  const place = buttons().indexOf(document.activeElement);
  const last = buttons().length - 1;
  const moves = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: last };
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key in moves) focusBit(moves[event.key]);
  else if (event.key === "ArrowUp") step(1n);
  else if (event.key === "ArrowDown") step(-1n);
  else return;
  event.preventDefault();
});

// Dark or light as the system says, until it is chosen here.
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
const themed = () => {
  const theme = chosen ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
};
dark.addEventListener("change", themed);
$("theme").addEventListener("click", () => {
  chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  themed();
});
themed();

let drawn = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawn) return;
  [drawn, compared] = [innerWidth, ""];
  show();
});
addEventListener("hashchange", () => {
  document.activeElement.blur(); // the field that is typed in would keep its text
  fromAddress();
  show();
});
fromAddress();
show();
