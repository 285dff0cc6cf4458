// Exact numbers as text, as src/halfstep/cli/formats/{number_text,text,values}.py.

const LONGEST = 1100;

// The number d.ddd * 10^exponent of these digits; without an e if the exponent is from -4 to `most`.
function placed(negative, text, exponent, most = 16) {
  const digits = text.replace(/0+$/, "") || "0";
  const sign = negative ? "-" : "";
  if (exponent < -4 || exponent > most) {
    return `${sign}${digits[0]}${digits.length > 1 ? `.${digits.slice(1)}` : ""}e${exponent}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
  const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
  return sign + whole + (digits.length > exponent + 1 ? `.${digits.slice(exponent + 1)}` : "");
}

const specialText = (x) => {
  if (x.type === "nan") return "nan";
  return (x.negative ? "-" : "") + (x.type === "zero" ? "0" : "inf");
};
const floorLog2 = (x) => exponentOf(x.n, x.d);

const timesPowerOf10 = (x, power) => (power < 0n ? [x.n, x.d * 10n ** -power] : [x.n * 10n ** power, x.d]);

// The e with 10^e <= |x| < 10^(e+1).
function floorLog10(x) {
  let guess = (floorLog2(x) * 30103n) / 100000n;
  const atLeast = (power) => {
    const [n, d] = timesPowerOf10(x, -power);
    return n >= d;
  };
  while (atLeast(guess + 1n)) guess += 1n;
  while (!atLeast(guess)) guess -= 1n;
  return guess;
}

// All decimal digits of a finite number; null if there are infinitely many, as for 1/3, or too many to read.
function decimal(number) {
  if (number.type === "zero") return "0";
  if ((number.n * 10n ** BigInt(LONGEST)) % number.d) return null;
  const x = reduced(number);
  if (bitLength(x.n) > 4 * LONGEST || bitLength(x.d) > 4 * LONGEST) return null;
  let [rest, twos, fives] = [x.d, 0, 0];
  for (; rest % 2n === 0n; twos++) rest /= 2n;
  for (; rest % 5n === 0n; fives++) rest /= 5n;
  const places = Math.max(twos, fives);
  if (rest !== 1n || places > LONGEST) return null;
  const digits = ((x.n * 10n ** BigInt(places)) / x.d).toString();
  return placed(x.negative, digits, digits.length - 1 - places);
}

// x rounded to a number of significant decimal digits, to nearest, ties to even.
function rounded(x, digits) {
  if (x.type === "zero") return "0";
  const exponent = floorLog10(x);
  const [n, d] = timesPowerOf10(x, BigInt(digits - 1) - exponent);
  const [whole, rest] = [n / d, n % d];
  const up = 2n * rest > d || (2n * rest === d && whole % 2n === 1n);
  const text = (whole + BigInt(up)).toString();
  return placed(x.negative, text, Number(exponent) + text.length - digits, Math.min(digits - 1, 16));
}

// x as a hexadecimal float of C and Python; null if it is not a binary fraction.
function hexFloat(number) {
  const sign = number.negative ? "-" : "";
  if (number.type === "zero") return `${sign}0x0p+0`;
  const x = reduced(number);
  if (x.d & (x.d - 1n)) return null;
  const exponent = floorLog2(x);
  const part = reduced(minus(times(absolute(x), powerOf2(-exponent)), finite(false, 1n)));
  const digits = (bitLength(under(part)) + 2n) / 4n;
  const text = digits ? `.${(top(part) * 16n ** digits / under(part)).toString(16).padStart(Number(digits), "0")}` : "";
  return `${sign}0x1${text}p${exponent < 0n ? "" : "+"}${exponent}`;
}

// x as a fraction in lowest terms; null where that is too long to read.
function ratioText(number) {
  if (number.type === "zero") return "0";
  const x = reduced(number);
  if (bitLength(x.n) >= 8000n || bitLength(x.d) >= 8000n) return null;
  return `${x.negative ? "-" : ""}${x.n}${x.d === 1n ? "" : `/${x.d}`}`;
}

// The shortest decimal that rounds to the value of this code.
function shortest(code, f) {
  const value = decode(code, f);
  if (value.type !== "finite") return specialText(value);
  const exponent = floorLog10(value);
  for (let digits = 1; digits < 800; digits++) {
    const power = exponent - BigInt(digits) + 1n;
    const [n, d] = timesPowerOf10(value, -power);
    const at = (count) => finite(value.negative, ...(power < 0n ? [count, 10n ** -power] : [count * 10n ** power, 1n]));
    const near = [n / d, n / d + 1n].filter((count) => count && encode(at(count), f) === code);
    if (near.length) {
      const away = (count) => (count * d > n ? count * d - n : n - count * d);
      // Of two as near the one that Python finds first: of negative numbers the one below.
      const best = near.length === 1 || away(near[0]) < away(near[1]) ? near[0]
        : away(near[1]) < away(near[0]) ? near[1] : near[Number(value.negative)];
      const text = best.toString();
      return placed(value.negative, text, Number(exponent) + text.length - digits);
    }
  }
  throw new Error("a decimal of 800 digits tells any two numbers apart");
}

const codeText = (code, f) => `0x${code.toString(16).padStart(Math.ceil(Number(f.bits) / 4), "0")}`;

// The bits of the fields, from the most significant one, as [name, bits].
function fieldsOf(code, f) {
  const bits = code.toString(2).padStart(Number(f.bits), "0");
  let start = 0;
  return [["sign", Number(f.signed)], ["exponent", f.exponent], ["mantissa", f.mantissa]]
    .map(([name, width]) => [name, bits.slice(start, (start += width))]).filter(([, part]) => part);
}
const bitsText = (code, f) => fieldsOf(code, f).map(([, part]) => part).join(" ");

// The value of a code in at most `width` signs: all its digits, or ≈ and the shortest decimal.
function valueText(code, f, width) {
  const value = decode(code, f);
  if (value.type !== "finite") return specialText(value);
  const whole = decimal(value);
  return whole !== null && whole.length <= width ? whole : `≈${shortest(code, f)}`;
}

// A number of ulps with four digits, or with as many as distinguish it from one half.
function distance(x) {
  if (x.type === "zero") return "0";
  for (let digits = 4; digits < 24; digits++) {
    const text = rounded(x, digits);
    if (text.replace(/^-/, "") !== "0.5" || 2n * x.n === x.d) return text;
  }
  return "≈0.5";
}

const grouped = (integer) => integer.toString().replace(/\B(?=(\d{3})+$)/g, ",");
