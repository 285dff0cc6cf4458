// Exact numbers, and texts as Python writes them. An int of Python is a BigInt, a float a Number, and a Fraction an
// object { n, d } in lowest terms with d > 0.

// What Python refuses with a ValueError.
export class Refused extends Error {}

const absolute = (x) => (x < 0n ? -x : x);
const least = (a, b) => (b < a ? b : a);
const most = (a, b) => (b > a ? b : a);
export const sum = (values) => values.reduce((a, b) => a + b, 0n);
const product = (values) => values.reduce((a, b) => a * b, 1n);
export const ceilDiv = (a, b) => (a + b - 1n) / b; // of a >= 0 and b > 0

export function fraction(n, d = 1n) {
  let [a, b] = [absolute(n), d];
  while (b) [a, b] = [b, a % b];
  return { n: n / (a || 1n), d: d / (a || 1n) };
}
const plus = (a, b) => fraction(a.n * b.d + b.n * a.d, a.d * b.d);
const times = (a, b) => fraction(a.n * b.n, a.d * b.d);
const scaled = (a, whole) => fraction(a.n * whole, a.d);
const ceiling = (a) => ceilDiv(a.n, a.d);

export function isqrt(value) {
  if (value < 2n) return value;
  let x = 1n << BigInt((value.toString(2).length + 1) >> 1);
  for (let y = (x + value / x) >> 1n; y < x; y = (x + value / x) >> 1n) x = y;
  return x;
}

// The double nearest to n / d, ties to even, as Python divides ints; n >= 0.
export function nearestDouble(n, d = 1n) {
  if (n === 0n) return 0;
  const shift = most(0n, BigInt(66 - n.toString(2).length + d.toString(2).length));
  const quotient = (n << shift) / d;
  const sticky = quotient * d === n << shift ? 0n : 1n; // below the last bit that matters, since there are 65 or more
  return Number(quotient | sticky) / 2 ** Number(shift);
}

// The integers of a finite double that is not negative: [n, d].
function ratioOf(x) {
  if (!(x >= 0 && x < Infinity)) throw new RangeError(`${x} is not a finite number of at least 0`);
  let d = 1n;
  for (; !Number.isInteger(x); x *= 2) d *= 2n;
  return [BigInt(x), d];
}

function halfEven(n, d) {
  const below = n / d;
  const twice = 2n * (n - below * d);
  return twice > d || (twice === d && below % 2n) ? below + 1n : below;
}

export const commas = (digits) => digits.toString().replace(/\B(?=(\d{3})+(?!\d))/g, ",");

// f"{x:,.{places}f}" of Python, for x >= 0. JavaScript's toFixed rounds ties up.
export function fixed(x, places) {
  const [n, d] = ratioOf(x);
  const digits = halfEven(n * 10n ** BigInt(places), d).toString().padStart(places + 1, "0");
  const at = digits.length - places;
  return commas(digits.slice(0, at)) + (places ? `.${digits.slice(at)}` : "");
}

// f"{x:.{precision}g}" of Python, for x >= 0.
export function general(x, precision = 6) {
  if (x === 0) return "0";
  const [n, d] = ratioOf(x);
  const rounded = (power) => (power > 0 ? halfEven(n, d * 10n ** BigInt(power)) : halfEven(n * 10n ** BigInt(-power), d));
  let exponent = Math.floor(Math.log10(x)) - 1; // one less, in case the logarithm is rounded up
  while (rounded(exponent - precision + 1) >= 10n ** BigInt(precision)) exponent += 1;
  const digits = rounded(exponent - precision + 1).toString();
  const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0*$/, "") : text);
  if (exponent < -4 || exponent >= precision) {
    const power = Math.abs(exponent).toString().padStart(2, "0");
    return `${trimmed(`${digits[0]}.${digits.slice(1)}`)}e${exponent < 0 ? "-" : "+"}${power}`;
  }
  if (exponent < 0) return trimmed(`0.${"0".repeat(-exponent - 1)}${digits}`);
  return trimmed(`${digits.slice(0, exponent + 1)}.${digits.slice(exponent + 1)}`);
}

// repr(x) of Python's float.
export function floatText(x) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x < 0 ? "-inf" : "inf";
  const [, sign, digits, part = "", power] = x.toExponential().match(/^(-?)(\d)(?:\.(\d+))?e([+-]\d+)$/);
  const exponent = Number(power);
  if (exponent < -4 || exponent >= 16) {
    const shown = Math.abs(exponent).toString().padStart(2, "0");
    return `${sign}${digits}${part && `.${part}`}e${exponent < 0 ? "-" : "+"}${shown}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}${part}`;
  const every = (digits + part).padEnd(exponent + 1, "0");
  return `${sign}${every.slice(0, exponent + 1)}.${every.slice(exponent + 1) || "0"}`;
}

// repr of a str, an int, a float, a bool or None.
export function repr(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "bigint") return value.toString();
  if (typeof value === "number") return floatText(value);
  const quote = value.includes("'") && !value.includes('"') ? '"' : "'";
  const named = { "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", [quote]: `\\${quote}` };
  const escaped = Array.from(value, (sign) => {
    const code = sign.codePointAt(0);
    return named[sign] ?? (code < 32 || (code > 126 && code < 161) ? `\\x${code.toString(16).padStart(2, "0")}` : sign);
  });
  return quote + escaped.join("") + quote;
}

// json.dumps(value, indent=2, ensure_ascii=False) of Python.
export function json(value, indent = "") {
  if (value === null) return "null";
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value !== "object") return typeof value === "boolean" ? String(value) : repr(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = `${indent}  `;
  const items = Array.isArray(value)
    ? value.map((one) => json(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${json(one, inner)}`);
  return items.length ? `${open}\n${inner}${items.join(`,\n${inner}`)}\n${indent}${close}` : open + close;
}

// ------------------------------------------------------------------------------------------- numerics/messages.py

// The share of two texts that matches: difflib.SequenceMatcher(None, a, b).ratio().
function likeness(a, b) {
  const matched = (a0, a1, b0, b1) => {
    let [size, at, to] = [0, 0, 0];
    for (let i = a0; i < a1; i++) {
      for (let j = b0; j < b1; j++) {
        let k = 0;
        while (i + k < a1 && j + k < b1 && a[i + k] === b[j + k]) k++;
        if (k > size) [size, at, to] = [k, i, j];
      }
    }
    return size && size + matched(a0, at, b0, to) + matched(at + size, a1, to + size, b1);
  };
  const length = a.length + b.length;
  return length ? (2 * matched(0, a.length, 0, b.length)) / length : 1;
}

function meant(word, words) {
  let near = null;
  for (const one of words) {
    const score = likeness(Array.from(one), Array.from(word));
    if (score >= 0.55 && (!near || score > near.score || (score === near.score && one > near.one))) near = { score, one };
  }
  return near ? `: did you mean ${repr(near.one)}?` : "";
}

export function oneOf(name, value, allowed) {
  if (allowed.includes(value)) return;
  throw new Refused(`Expected ${name} to be one of ${allowed.join(", ")}, but got ${repr(value)}${meant(value, allowed)}`);
}

function divides(name, value, ofName, of, remedy) {
  if (of % value) throw new Refused(`Expected ${name} to divide ${ofName}, ${of}, but got ${value}: ${remedy}`);
}
