// Exact arithmetic of number formats, as numerics/formats/{table,exact}.py, which specify it. The facts of the formats
// come from Python when the page is written; here are only rules. Numbers are
//   { type: "nan" | "inf" | "zero" | "finite", negative, n, d }   with the magnitude n / d in positive BigInts.

const bitLength = (x) => BigInt(x.toString(16).length * 4 - Math.clz32(parseInt(x.toString(16)[0], 16)) + 28);
const times2 = (x, power) => (power >= 0n ? [x << power, 1n] : [x, 1n << -power]);

export const nan = (negative = false) => ({ type: "nan", negative });
export const infinity = (negative = false) => ({ type: "inf", negative });
export const zero = (negative = false) => ({ type: "zero", negative });
export const finite = (negative, n, d = 1n) => (n ? { type: "finite", negative, n, d } : zero(negative));

// A row of the table with the codes that follow from it.
export function format(row) {
  const [e, m, bias] = [BigInt(row.exponent), BigInt(row.mantissa), BigInt(row.bias)];
  const { kind } = row;
  const signed = kind !== "scale";
  const bits = e + m + BigInt(signed);
  const signBit = signed ? 1n << (bits - 1n) : 0n;
  const allOnes = (1n << (bits - BigInt(signed))) - 1n;
  const infinityCode = kind === "ieee" ? ((1n << e) - 1n) << m : null;
  let largest = allOnes;
  if (kind === "ieee") largest = infinityCode - 1n;
  else if (kind === "fn" || kind === "scale") largest = allOnes - 1n;
  let nanCode = null;
  if (kind === "ieee") nanCode = m ? largest + 1n + (1n << (m - 1n)) : null;
  else if (kind === "fnuz") nanCode = signBit;
  else if (kind === "fn" || kind === "scale") nanCode = largest + 1n;
  const emin = kind === "integer" ? 0n : (kind === "scale" ? 0n : 1n) - bias;
  const negativeZero = kind === "ieee" || kind === "fn" || kind === "finite";
  const subnormals = kind !== "scale" && kind !== "integer" && m > 0n;
  return { ...row, e, m, bits, signBit, infinityCode, largest, nanCode, emin, negativeZero, subnormals, signed };
}

// The value of a code: the sign, the fields and, for a NaN, nothing more.
export function decode(code, f) {
  if (code < 0n || code >= 1n << f.bits) throw new RangeError(`${f.name} has codes of ${f.bits} bits`);
  if (f.kind === "integer") {
    const value = code & f.signBit ? code - (1n << f.bits) : code;
    return finite(value < 0n, value < 0n ? -value : value);
  }
  const negative = (code & f.signBit) !== 0n;
  const magnitude = code & ~f.signBit;
  if (f.kind === "fnuz" && code === f.signBit) return nan();
  if (magnitude > f.largest) return magnitude === f.infinityCode ? infinity(negative) : nan(negative);
  if (f.kind === "scale") return finite(false, ...times2(1n, magnitude + f.emin));
  const field = magnitude >> f.m;
  const units = (magnitude & ((1n << f.m) - 1n)) + (field ? 1n << f.m : 0n);
  return finite(negative, ...times2(units, (field > 1n ? field : 1n) - 1n + f.emin - f.m));
}

export function classify(code, f) {
  const value = decode(code, f);
  if (value.type !== "finite") return { nan: "NaN", inf: "infinity", zero: "zero" }[value.type];
  return f.subnormals && (code & ~f.signBit) < 1n << f.m ? "subnormal" : "normal";
}

function exponentOf(n, d) {
  const guess = bitLength(n) - bitLength(d);
  const enough = guess >= 0n ? n >= d << guess : n << -guess >= d;
  return enough ? guess : guess - 1n;
}

// k, and d as the fraction rest / whole, and the exponent of the unit: the magnitude is (k + d) units.
export function units(number, f) {
  const exponent = exponentOf(number.n, number.d);
  const floor = exponent > f.emin ? exponent : f.emin;
  const power = f.kind === "integer" ? 0n : f.kind === "scale" ? floor : floor - f.m;
  const whole = power > 0n ? number.d << power : number.d;
  const top = power < 0n ? number.n << -power : number.n;
  return { below: top / whole, rest: top % whole, whole, power };
}

const codeOf = (k, power, f) => {
  if (f.kind === "integer") return k;
  if (f.kind === "scale") return k + power - f.emin - 1n;
  return k + ((power - (f.emin - f.m)) << f.m);
};
const largestMagnitude = (negative, f) => f.largest + BigInt(f.kind === "integer" && negative);

export function signedCode(magnitude, negative, f) {
  if (!negative || (magnitude === 0n && !f.negativeZero)) return magnitude;
  return f.kind === "integer" ? (1n << f.bits) - magnitude : magnitude | f.signBit;
}

export function beyondCode(negative, f, overflow) {
  if (overflow === "saturate" || (overflow === "inf" && f.infinityCode === null && f.nanCode === null)) {
    return f.kind === "scale" && negative ? 0n : signedCode(largestMagnitude(negative, f), negative, f);
  }
  if (overflow === "inf" && f.infinityCode !== null) return signedCode(f.infinityCode, negative, f);
  if (f.nanCode === null) throw new RangeError(`${f.name} has no NaN`);
  return f.nanCode;
}

// The 16 random bits of an element, a one and 15 zeros: Philox4x32-7, as numerics/formats/philox_words.py.
export function word(index, seed) {
  const mask = 0xffffffffn;
  const group = index / 8n;
  let [c0, c1, c2, c3] = [group & mask, (group >> 32n) & mask, 0n, 0n];
  let [k0, k1] = [seed & mask, seed >> 32n];
  for (let round = 0; round < 7; round++) {
    const [p0, p1] = [c0 * 0xd2511f53n, c2 * 0xcd9e8d57n];
    [c0, c1, c2, c3] = [(p1 >> 32n) ^ c1 ^ k0, p1 & mask, (p0 >> 32n) ^ c3 ^ k1, p0 & mask];
    [k0, k1] = [(k0 + 0x9e3779b9n) & mask, (k1 + 0xbb67ae85n) & mask];
  }
  const both = [c0, c1, c2, c3][Number((index % 8n) / 2n)];
  return ((index % 2n ? both >> 16n : both & 0xffffn) << 16n) | 0x8000n;
}

// Whether rounding chooses k + 1.
function away({ below, rest, whole }, rounding, negative, random, f) {
  const odd = below % 2n === 1n;
  if (rounding === "nearest") return 2n * rest > whole || (2n * rest === whole && odd);
  if (rounding === "nearest_away") return 2n * rest >= whole;
  if (rounding === "odd") return rest > 0n && !odd;
  if (rounding === "stochastic") {
    const coarse = f.emin > -126n && f.subnormals && f.m <= 10n && below < 1n << f.m;
    if (!coarse) return random * whole + (rest << 32n) >= whole << 32n;
    const steps = 23n - f.m;
    let near = (rest << steps) / whole;
    const left = 2n * ((rest << steps) % whole);
    if (left > whole || (left === whole && near % 2n)) near += 1n;
    return (random >> (32n - steps)) + near >= 1n << steps;
  }
  return rest > 0n && rounding === (negative ? "down" : "up");
}

// The code of a number. Options: rounding, overflow and subnormals as of halfstep.encode; seed and offset in BigInts.
export function encode(number, f, rounding = "nearest", options = {}) {
  const { overflow = "inf", subnormals = true, seed = 0n, offset = 0n } = options;
  const { negative } = number;
  if (number.type === "nan") {
    if (f.nanCode === null) throw new RangeError(`${f.name} has no NaN`);
    return f.nanCode;
  }
  if (number.type === "inf" || (number.type === "finite" && f.kind === "scale" && negative)) {
    return beyondCode(negative, f, overflow);
  }
  if (number.type === "zero") return signedCode(0n, negative, f);
  const parts = units(number, f);
  if (parts.below === 0n && f.kind === "scale") return 0n;
  const random = rounding === "stochastic" ? word(offset, seed) : 0n;
  const up = away(parts, rounding, negative, random, f);
  const code = codeOf(parts.below + BigInt(up), parts.power, f);
  if (code > largestMagnitude(negative, f)) {
    const stops = rounding === "toward_zero" || rounding === "odd" || rounding === (negative ? "up" : "down");
    return beyondCode(negative, f, stops ? "saturate" : overflow);
  }
  if (!subnormals && f.subnormals && code < 1n << f.m) return signedCode(0n, negative, f);
  return signedCode(code, negative, f);
}

// The code of the next number of the format above (step 1n) or below (-1n) a code that is a number of it.
export function next(code, f, step) {
  const value = decode(code, f);
  if (value.type === "nan") return null;
  const lowest = f.kind === "scale" ? 0n : -largestMagnitude(true, f);
  const magnitude = f.kind === "integer" && value.negative ? (1n << f.bits) - code : code & ~f.signBit;
  let place = value.negative ? -magnitude : magnitude;
  if (value.type === "inf") place = value.negative ? lowest - 1n : f.largest + 1n;
  // An infinity's next number away from zero is itself.
  place += step;
  if (place < lowest - 1n) place = lowest - 1n;
  if (place > f.largest + 1n) place = f.largest + 1n;
  if (place < lowest || place > f.largest) return f.kind === "scale" ? f.nanCode : beyondCode(place < lowest, f, "inf");
  const minusZero = place === 0n && step === 1n && f.kind !== "scale";
  return signedCode(place < 0n ? -place : place, place < 0n || minusZero, f);
}

// The decimal expansion of a number whose denominator is a power of two: exact, so without rounding.
export function decimal(number) {
  if (number.type === "nan") return "nan";
  const sign = number.negative ? "-" : "";
  if (number.type === "inf") return `${sign}inf`;
  if (number.type === "zero") return `${sign}0`;
  const places = bitLength(number.d) - 1n;
  if (number.d !== 1n << places) return `${sign}${number.n}/${number.d}`;
  const digits = (number.n * 5n ** places).toString().padStart(Number(places) + 1, "0");
  const at = digits.length - Number(places);
  const part = digits.slice(at).replace(/0+$/, "");
  return sign + digits.slice(0, at) + (part && `.${part}`);
}
