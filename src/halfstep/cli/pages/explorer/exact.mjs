// Exact arithmetic of number formats, as numerics/formats/{table,exact}.py, which specify it. The facts of the formats
// come from Python when the page is written; here are only rules. Numbers are
//   { type: "nan" | "inf" | "zero" | "finite", negative, n, d, payload }
// with the magnitude n / d in positive BigInts, and the lower 52 bits of a NaN in float64.

const QUIET = 1n << 51n;

const bitLength = (x) => BigInt(x.toString(16).length * 4 - Math.clz32(parseInt(x.toString(16)[0], 16)) + 28);
const times2 = (x, power) => (power >= 0n ? [x << power, 1n] : [x, 1n << -power]);

const nan = (negative = false, payload = QUIET) => ({ type: "nan", negative, payload });
const infinity = (negative = false) => ({ type: "inf", negative });
const zero = (negative = false) => ({ type: "zero", negative });
const finite = (negative, n, d = 1n) => (n ? { type: "finite", negative, n, d } : zero(negative));

// A row of the table with the codes that follow from it.
function format(row) {
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
  const emax = kind === "integer" ? m - 1n : (largest >> m) - bias;
  const negativeZero = kind === "ieee" || kind === "fn" || kind === "finite";
  const subnormals = kind !== "scale" && kind !== "integer" && m > 0n;
  return { ...row, e, m, bits, signBit, infinityCode, largest, nanCode, emin, emax, negativeZero, subnormals, signed };
}

// The value of a code.
function decode(code, f) {
  if (code < 0n || code >= 1n << f.bits) {
    const last = ((1n << f.bits) - 1n).toString(16);
    throw new RangeError(`Expected a code of ${f.name} to be from 0 to 0x${last}, but got 0x${code.toString(16)}`);
  }
  if (f.kind === "integer") {
    const value = code & f.signBit ? code - (1n << f.bits) : code;
    return finite(value < 0n, value < 0n ? -value : value);
  }
  const negative = (code & f.signBit) !== 0n;
  const magnitude = code & ~f.signBit;
  if (f.kind === "fnuz" && code === f.signBit) return nan();
  if (magnitude > f.largest) {
    if (magnitude === f.infinityCode) return infinity(negative);
    return nan(negative, QUIET | (f.kind === "ieee" ? (magnitude & ((1n << f.m) - 1n)) << (52n - f.m) : 0n));
  }
  if (f.kind === "scale") return finite(false, ...times2(1n, magnitude + f.emin));
  const field = magnitude >> f.m;
  const units = (magnitude & ((1n << f.m) - 1n)) + (field ? 1n << f.m : 0n);
  return finite(negative, ...times2(units, (field > 1n ? field : 1n) - 1n + f.emin - f.m));
}

function classify(code, f) {
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
function units(number, f) {
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

function signedCode(magnitude, negative, f) {
  if (!negative || (magnitude === 0n && !f.negativeZero)) return magnitude;
  return f.kind === "integer" ? (1n << f.bits) - magnitude : magnitude | f.signBit;
}

function beyondCode(negative, f, overflow) {
  if (overflow === "saturate" || (overflow === "inf" && f.infinityCode === null && f.nanCode === null)) {
    return f.kind === "scale" && negative ? 0n : signedCode(largestMagnitude(negative, f), negative, f);
  }
  if (overflow === "inf" && f.infinityCode !== null) return signedCode(f.infinityCode, negative, f);
  return f.nanCode;
}

// The 16 random bits of an element, a one and 15 zeros: Philox4x32-7, as numerics/formats/philox_words.py.
function word(index, seed) {
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

function nanCode(number, f, choice) {
  if (choice === "zero") return 0n;
  if (choice === "raise") {
    const instead = "pass nan='canonical', 'payload' or 'zero'";
    throw new RangeError(`Expected values without NaN with nan='raise', but got one: ${instead}`);
  }
  if (f.nanCode === null) {
    const instead = "pass nan='zero', or replace it before";
    throw new RangeError(`Expected values without NaN for ${f.name}, which has none, but got one: ${instead}`);
  }
  if (choice === "canonical" || (f.kind !== "ieee" && f.kind !== "fn")) return f.nanCode;
  return f.nanCode | (f.kind === "ieee" ? number.payload >> (52n - f.m) : 0n) | (number.negative ? f.signBit : 0n);
}

// The code of a number. Options: overflow, nan and subnormals as of halfstep.encode; seed and offset in BigInts.
function encode(number, f, rounding = "nearest", options = {}) {
  const { overflow = "inf", nan: choice = "canonical", subnormals = true, seed = 0n, offset = 0n } = options;
  const { negative } = number;
  if (overflow === "nan" && f.nanCode === null) {
    throw new RangeError(
      `Expected overflow to be 'inf' or 'saturate' for ${f.name}, which has no NaN, but got 'nan'`,
    );
  }
  if (number.type === "nan") return nanCode(number, f, choice);
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

// The place of a number is its position in the order of the format's numbers: 0 is zero (in E8M0 the least number), the
// largest finite numbers are at the ends, and places beyond them stand for overflow.
const ends = (f) => [f.kind === "scale" ? 0n : -largestMagnitude(true, f), f.largest];

// The place of the greatest number not above `number`; one below the lowest place if there is none.
function floorPlace(number, f) {
  const [lowest, highest] = ends(f);
  if (number.type === "inf") return number.negative ? lowest - 1n : highest + 1n;
  if (number.type === "zero") return f.kind === "scale" ? -1n : 0n;
  if (f.kind === "scale" && number.negative) return -1n;
  const { below, rest, power } = units(number, f);
  if (f.kind === "scale" && below === 0n) return -1n;
  const code = codeOf(below, power, f);
  const place = number.negative ? -(code + BigInt(rest > 0n)) : code;
  if (place < lowest) return lowest - 1n;
  return place > highest ? highest + 1n : place;
}

// The place of the least number not below `number`; one above the highest place if there is none.
function ceilingPlace(number, f) {
  const floor = floorPlace(number, f);
  const [lowest, highest] = ends(f);
  if (number.type === "inf") return floor;
  if (floor >= lowest && floor <= highest && compare(decode(placeCode(floor, f, false), f), number) === 0) return floor;
  return floor + 1n;
}

// The code at a place. At place 0 it is that of -0 if `rising` and the format has a negative zero.
function placeCode(place, f, rising) {
  const [lowest, highest] = ends(f);
  if (place < lowest || place > highest) {
    return f.kind === "scale" ? f.nanCode : beyondCode(place < lowest, f, "inf");
  }
  const negative = place < 0n || (place === 0n && rising && f.kind !== "scale");
  return signedCode(place < 0n ? -place : place, negative, f);
}

// The code of the least number of the format above (step 1n) or the greatest below (-1n) a number; null for NaN.
function nextCode(number, f, step) {
  if (number.type === "nan") return null;
  return step > 0n ? placeCode(floorPlace(number, f) + 1n, f, true) : placeCode(ceilingPlace(number, f) - 1n, f, false);
}

// --------------------------------------------------------------------------------------------------------- fractions

const top = (x) => (x.type === "zero" ? 0n : x.negative ? -x.n : x.n);
const under = (x) => (x.type === "zero" ? 1n : x.d);
const isFinite = (x) => x.type === "finite" || x.type === "zero";

// The greatest common divisor of two positive integers, by Lehmer's algorithm: for numbers of 60,000 digits in binary,
// Euclid's takes a second. The leading 52 bits give the quotients of several steps at once, while both bounds agree.
function divisor(a, b) {
  if (a < b) [a, b] = [b, a];
  while (b >> 64n) {
    const cut = bitLength(a) - 52n;
    let [x, y] = [Number(a >> cut), Number(b >> cut)];
    let [p, q, r, s] = [1, 0, 0, 1];
    while (y + r > 0 && y + s > 0) {
      const quotient = Math.floor((x + p) / (y + r));
      if (quotient !== Math.floor((x + q) / (y + s))) break;
      const [u, v] = [p - quotient * r, q - quotient * s];
      if (Math.abs(u) > 2 ** 25 || Math.abs(v) > 2 ** 25) break;
      [p, q, r, s, x, y] = [r, s, u, v, y, x - quotient * y];
    }
    if (q === 0) [a, b] = [b, a % b];
    else {
      const [l, m, n, o] = [p, q, r, s].map(BigInt);
      [a, b] = [l * a + m * b, n * a + o * b];
    }
  }
  while (b) [a, b] = [b, a % b];
  return a;
}

// n / d; `d` may be negative.
const fraction = (n, d = 1n) => finite(n !== 0n && n < 0n !== d < 0n, n < 0n ? -n : n, d < 0n ? -d : d);
// In lowest terms, which the operations below do not keep.
function reduced(x) {
  if (x.type !== "finite" || x.d === 1n) return x;
  const common = divisor(x.n, x.d);
  return finite(x.negative, x.n / common, x.d / common);
}
const powerOf2 = (power) => finite(false, ...times2(1n, power));
const plus = (a, b) => fraction(top(a) * under(b) + top(b) * under(a), under(a) * under(b));
const minus = (a, b) => fraction(top(a) * under(b) - top(b) * under(a), under(a) * under(b));
const times = (a, b) => fraction(top(a) * top(b), under(a) * under(b));
const over = (a, b) => fraction(top(a) * under(b), under(a) * top(b));
const absolute = (x) => ({ ...x, negative: false });

// -1, 0 or 1 for two numbers of which none is NaN.
function compare(a, b) {
  const rank = (x) => (x.type === "inf" ? (x.negative ? -1 : 1) : 0);
  if (rank(a) || rank(b)) return Math.sign(rank(a) - rank(b));
  const [left, right] = [top(a) * under(b), top(b) * under(a)];
  return left < right ? -1 : left > right ? 1 : 0;
}

// The greatest integer not above a finite number.
function floor(x) {
  const whole = top(x) / under(x);
  return top(x) < 0n && whole * under(x) !== top(x) ? whole - 1n : whole;
}

// The distance between the format's numbers around a finite number, as if the exponent had no upper limit.
function ulp(number, f) {
  if (f.kind === "integer") return finite(false, 1n);
  const exponent = number.type === "zero" ? f.emin : exponentOf(number.n, number.d);
  return powerOf2((exponent > f.emin ? exponent : f.emin) - f.m);
}
