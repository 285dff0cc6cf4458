// The page: what is typed or clicked becomes the state, which is written to the address and shown.

const $ = (id) => document.getElementById(id);
const state = { x: "0.1", f: "bf16", r: "nearest", o: "inf", s: "1", ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };

// Texts are numbers as halfstep's parse_number reads them; without sums.
export function parse(text) {
  const plain = text.trim().toLowerCase().replace("\u2212", "-");
  const wrong = () => new RangeError(`${JSON.stringify(text)} is not a number: write 0.1, 1e-40, 0x1.8p-3, 1/3, 2^-24, inf or nan`);
  const ratio = plain.match(/^([^/]+)\/([^/]+)$/);
  if (ratio) {
    const [a, b] = [parse(ratio[1]), parse(ratio[2])];
    if (b.type !== "finite" || a.type === "nan" || a.type === "inf") throw wrong();
    return a.type === "zero" ? zero(a.negative !== b.negative) : finite(a.negative !== b.negative, a.n * b.d, a.d * b.n);
  }
  const [, sign, rest] = plain.match(/^([+-]?)(.*)$/);
  const negative = sign === "-";
  if (rest === "inf" || rest === "infinity") return infinity(negative);
  if (rest === "nan") return nan(negative);
  const scaled = (digits, part, base, step, power) => {
    if (Math.abs(power) > 65536) throw new RangeError("Expected magnitudes from 2^-65536 to 2^65536");
    const exponent = BigInt(power) - BigInt(step * part.length);
    const n = BigInt(digits);
    return exponent >= 0n ? finite(negative, n * base ** exponent) : finite(negative, n, base ** -exponent);
  };
  let found = rest.match(/^0x([0-9a-f]*)\.?([0-9a-f]*)(?:p([+-]?\d+))?$/);
  if (found && found[1] + found[2]) return scaled(`0x${found[1]}${found[2]}`, found[2], 2n, 4, Number(found[3] ?? 0));
  found = rest.match(/^(\d*)\.?(\d*)(?:e([+-]?\d{1,5}))?$/);
  if (found && found[1] + found[2]) return scaled(found[1] + found[2], found[2], 10n, 1, Number(found[3] ?? 0));
  found = rest.match(/^2(?:\^|\*\*)([+-]?\d{1,5})$/);
  if (found) return scaled("1", "", 2n, 0, Number(found[1]));
  throw wrong();
}

// A format by its name or alias, or eXmY with the usual bias.
export function formatOf(text) {
  const plain = text.trim().toLowerCase().replace(/[\s_-]/g, "");
  const known = Object.values(formats).find((f) => [f.name, ...f.aliases].some((a) => a.replace(/[\s_-]/g, "") === plain));
  if (known) return known;
  const fields = plain.match(/^e(\d+)m(\d+)(ieee|fn|fnuz|finite)?$/);
  const [e, m, kind] = fields ? [Number(fields[1]), Number(fields[2]), fields[3] ?? "ieee"] : [];
  const least = kind === "ieee" ? 2 : 1;
  if (!fields || e < least || e > 11 || m > 52 || (kind === "fn" && m < 1)) {
    throw new RangeError(`${JSON.stringify(text)} is not a format: choose ${Object.keys(formats).join(", ")}, or fields such as e5m7`);
  }
  const bias = 2 ** (e - 1) - (kind === "fnuz" ? 0 : 1);
  const made = format({ name: plain, title: "a format of your own", exponent: e, mantissa: m, bias, kind, aliases: [], hardware: [] });
  return Object.values(formats).find((f) => f.e === made.e && f.m === made.m && f.bias === bias && f.kind === kind) ?? made;
}

const hex = (code, f) => `0x${code.toString(16).padStart(Math.ceil(Number(f.bits) / 4), "0")}`;
const short = (text) => (text.length > 40 ? `${text.slice(0, 36)}…` : text);
const isFinite = (x) => x.type === "finite" || x.type === "zero";
const signed = (x) => (x.type === "finite" ? [x.negative ? -x.n : x.n, x.d] : [0n, 1n]);

function difference(a, b) {
  const [[p, q], [r, s]] = [signed(a), signed(b)];
  const n = p * s - r * q;
  return finite(n < 0n, n < 0n ? -n : n, q * s);
}

// About seven digits, for the columns of errors and ulps.
function about(x) {
  if (x.type !== "finite") return decimal(x);
  const digits = (n) => n.toString().length;
  let power = digits(x.n) - digits(x.d);
  const scale = (p) => (p >= 0 ? [x.n, x.d * 10n ** BigInt(p)] : [x.n * 10n ** BigInt(-p), x.d]);
  let [n, d] = scale(power);
  if (n < d) [n, d] = scale((power -= 1));
  const top = ((n * 1000000n) / d).toString();
  return `${x.negative ? "-" : ""}${`${top[0]}.${top.slice(1)}`.replace(/\.?0+$/, "")}${power ? `e${power}` : ""}`;
}

const RULES = {
  nearest_away: "nearest, and ties go away from zero", toward_zero: "toward zero, which takes the smaller magnitude",
  up: "up, which takes the larger number", down: "down, which takes the smaller number",
  odd: "to odd, which takes the neighbour whose last bit is 1",
};

// Why the number gets this code, in words.
export function reason(number, f, rounding, code, overflow, subnormals) {
  const value = decode(code, f);
  if (number.type !== "finite") return `The number is ${decimal(number)}, which becomes ${decimal(value)}.`;
  if (f.kind === "scale" && number.negative) return `${f.name} has no sign: negative numbers overflow.`;
  const parts = units(number, f);
  if (f.kind === "scale" && parts.below === 0n) return "Every smaller number becomes the least one of the format.";
  if (encode(number, f, rounding) !== encode(number, f, rounding, { overflow, subnormals })) {
    if (value.type === "zero") return "The result is subnormal, and subnormal results are flushed to zero.";
    return `The number rounds to more than the largest number, and overflow="${overflow}" makes it ${decimal(value)}.`;
  }
  if (!isFinite(value)) return `The number rounds to more than the largest number, so it overflows to ${decimal(value)}.`;
  if (parts.rest === 0n && difference(value, number).type === "zero") return "The number is one of the format's: nothing is rounded.";
  const [down, up] = [0n, 1n].map((more) => encode(finite(number.negative, parts.power < 0n ? parts.below + more : (parts.below + more) << parts.power, parts.power < 0n ? 1n << -parts.power : 1n), f, "toward_zero"));
  if (down === up) return `The number is beyond the largest number, and the result is ${decimal(value)}.`;
  const between = `The neighbours are ${about(decode(down, f))} (${hex(down, f)}) and ${about(decode(up, f))} (${hex(up, f)}).`;
  const half = 2n * parts.rest - parts.whole;
  const chosen = code === down ? "first" : "second";
  if (rounding !== "nearest" && RULES[rounding]) return `${between} Rounding is ${RULES[rounding]}: the ${chosen}.`;
  if (half === 0n) return `${between} The number is exactly in the middle, a tie, which goes to the even one: the ${chosen}.`;
  const share = Number((parts.rest * 1000n) / parts.whole) / 10;
  return `${between} The number is ${share} % of the way from the first to the second: the ${chosen} is nearer.`;
}

function row(cells, head) {
  const tr = document.createElement("tr");
  cells.forEach((text, i) => {
    const cell = tr.appendChild(document.createElement(i ? "td" : "th"));
    if (!i) cell.scope = "row";
    if (!i && head) {
      const button = cell.appendChild(document.createElement("button"));
      button.type = "button";
      button.addEventListener("click", () => set({ f: text }));
      button.textContent = text;
    } else cell.textContent = text;
  });
  return tr;
}

const options = () => ({ overflow: state.o, subnormals: state.s === "1" });
// What a format does with the number; formats without NaN refuse it, and overflow to it.
function attempt(number, f, rounding) {
  try {
    return encode(number, f, rounding, f.nanCode === null && state.o === "nan" ? { ...options(), overflow: "inf" } : options());
  } catch {
    return null;
  }
}

function ulp(number, f) {
  if (!isFinite(number)) return infinity();
  if (f.kind === "integer") return finite(false, 1n);
  const power = number.type === "finite" && f.kind !== "scale" ? units(number, f).power : f.kind === "scale" && number.type === "finite" ? units({ ...number, negative: false }, f).power : f.emin - f.m;
  return power >= 0n ? finite(false, 1n << power) : finite(false, 1n, 1n << -power);
}

function show() {
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  for (const id of ["x", "f", "r", "o", "s"]) if (document.activeElement !== $(id)) $(id).value = state[id];
  let number, f;
  try {
    number = parse(state.x);
    f = formatOf(state.f);
  } catch (error) {
    $("error").textContent = error.message;
    return;
  }
  $("error").textContent = "";
  $("all").replaceChildren(...Object.values(formats).map((each) => {
    const code = attempt(number, each, state.r);
    if (code === null) return row([each.name, "none", "no NaN", "", "", ""], true);
    const value = decode(code, each);
    const error = isFinite(value) && isFinite(number) ? about(difference(value, number)) : "";
    const line = row([each.name, hex(code, each), short(decimal(value)), error, about(ulp(number, each)), classify(code, each)], true);
    if (each.name === f.name) line.setAttribute("aria-current", "true");
    return line;
  }));
  $("modes").replaceChildren(...modes.filter((mode) => mode !== "stochastic").map((mode) => {
    const code = attempt(number, f, mode);
    return row(code === null ? [mode, "none", "no NaN"] : [mode, hex(code, f), decimal(decode(code, f))]);
  }));
  const code = attempt(number, f, state.r);
  if (code === null) {
    $("error").textContent = `${f.name} has no NaN.`;
    return;
  }
  if (document.activeElement !== $("code")) $("code").value = hex(code, f);
  $("bits").replaceChildren(...Array.from({ length: Number(f.bits) }, (_, i) => {
    const at = f.bits - 1n - BigInt(i);
    const part = 1n << at === f.signBit ? "sign" : at >= f.m ? "exponent" : "mantissa";
    const button = document.createElement("button");
    button.type = "button";
    button.className = part;
    button.textContent = ((code >> at) & 1n).toString();
    button.setAttribute("aria-label", `${part} bit ${at}: ${button.textContent}`);
    button.addEventListener("click", () => {
      fromCode(code ^ (1n << at), f);
      $("bits").children[i]?.focus();
    });
    return button;
  }));
  $("why").textContent = state.r === "stochastic" ? "" : reason(number, f, state.r, code, f.nanCode === null && state.o === "nan" ? "inf" : state.o, state.s === "1");
  const value = decode(code, f);
  const beside = [-1n, 1n].map((step) => next(code, f, step)).map((c) => (c === null ? "none" : `${decimal(decode(c, f))} (${hex(c, f)})`));
  const facts = { format: `${f.name}, ${f.title}`, "exact value": decimal(value), previous: beside[0], next: beside[1], class: classify(code, f) };
  $("facts").replaceChildren(...Object.entries(facts).flatMap(([name, text]) => {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    [dt.textContent, dd.textContent] = [name, text];
    return [dt, dd];
  }));
}

function set(changed) {
  Object.assign(state, changed);
  show();
}

// The number of a code; it is a number of the format, so no mode rounds it.
function fromCode(code, f) {
  if (code >= 1n << f.bits) throw new RangeError(`Expected a code of ${f.name} of ${f.bits} bits`);
  set({ x: decimal(decode(code, f)), s: "1" });
}

for (const [id, names] of [["r", modes.filter((mode) => mode !== "stochastic")], ["o", overflows]]) {
  $(id).replaceChildren(...names.map((name) => new Option(name, name)));
  if (!names.includes(state[id])) state[id] = names[0];
}
$("names").replaceChildren(...Object.values(formats).map((f) => new Option(f.title, f.name)));
for (const id of ["x", "f", "r", "o", "s"]) $(id).addEventListener("input", () => set({ [id]: $(id).value }));
$("code").addEventListener("input", () => {
  try {
    fromCode(BigInt($("code").value.trim()), formatOf(state.f));
  } catch (error) {
    $("error").textContent = error instanceof SyntaxError ? "A code is an integer, such as 0x3f80" : error.message;
  }
});
addEventListener("hashchange", () => set(Object.fromEntries(new URLSearchParams(location.hash.slice(1)))));
const themed = (dark) => {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
};
themed(state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  themed(theme === "dark");
  set({ theme });
});
show();
