// Texts of numbers and of formats, as numerics/formats/{parse,table}.py read them, with the same errors.

const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const strip = (text) => text.replace(new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "g"), "");

// The repr of a text in Python.
function repr(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escape = (sign) => {
    const short = { "\t": "\\t", "\n": "\\n", "\r": "\\r" }[sign];
    if (short) return short;
    if (sign === "\\" || sign === quote) return `\\${sign}`;
    if (sign === " " || !/[\p{C}\p{Z}]/u.test(sign)) return sign;
    const hex = sign.codePointAt(0).toString(16);
    return hex.length <= 2 ? `\\x${hex.padStart(2, "0")}` : hex.length <= 4 ? `\\u${hex.padStart(4, "0")}`
      : `\\U${hex.padStart(8, "0")}`;
  };
  return quote + [...text].map(escape).join("") + quote;
}

// ----------------------------------------------------------------------------------------------------------- numbers

const LARGEST_TEXT = 4000;
const LARGEST_POWER = 65536n;
const LARGEST_DECIMAL_POWER = 19000n;
const TOKEN = new RegExp(
  "(?<hexadecimal>0x(?:[0-9a-f]+(?:\\.[0-9a-f]*)?|\\.[0-9a-f]+)(?:p[+-]?[0-9]+)?)" +
  "|(?<decimal>(?:[0-9]+(?:_[0-9]+)*(?:\\.[0-9]*)?|\\.[0-9]+)(?:e[+-]?[0-9]+)?)" +
  "|(?<special>infinity|inf|nan)|(?<operator>\\*\\*|[-+*/^()])", "y");

// The number that a text means, exactly. The grammar is in parse.py.
function parseNumber(text) {
  const signs = [...text];
  if (signs.length > LARGEST_TEXT) {
    throw new RangeError(`Expected a number of at most ${LARGEST_TEXT} characters, but got ${signs.length}`);
  }
  const shown = repr(signs.length <= 60 ? text : `${signs.slice(0, 57).join("")}...`);
  const wrong = (why) => new RangeError(
    `${shown} is not a number: ${why}. Write decimals (1e-400), hexadecimal floats (0x1.8p-3), ` +
    "inf, nan, fractions (1/3), powers (2^-24), and sums and products of these");
  const tooFar = () => new RangeError(
    `Expected magnitudes from 2^-${LARGEST_POWER} to 2^${LARGEST_POWER}, also of intermediate results, but got ` +
    `${shown}: for infinity write inf, for zero 0`);

  const plain = text.replace(/\u2212/g, "-").replace(/\u00d7/g, "*").replace(/\u221e/g, "inf").toLowerCase();
  const tokens = [];
  const space = new RegExp(`[${SPACE}]+`, "y");
  for (let at = 0; at < plain.length;) {
    space.lastIndex = TOKEN.lastIndex = at;
    if (space.test(plain)) {
      at = space.lastIndex;
      continue;
    }
    const found = TOKEN.exec(plain);
    if (!found) throw wrong(`${repr(plain.slice(at).split(new RegExp(`[${SPACE}]`))[0])} is not understood`);
    tokens.push([Object.entries(found.groups).find(([, group]) => group !== undefined)[0], found[0]]);
    at = TOKEN.lastIndex;
  }

  let [at, depth] = [0, 0];
  const take = (...operators) => (at < tokens.length && operators.includes(tokens[at][1]) ? tokens[at++][1] : null);
  const deeper = (rule) => {
    depth += 1;
    if (depth > 50) throw wrong("it is nested more than 50 deep");
    const value = rule();
    depth -= 1;
    return value;
  };
  const finiteOf = (value, operator) => {
    if (isFinite(value)) return value;
    throw wrong(`${repr(operator)} is not defined here for infinities and NaN, which stand alone`);
  };
  const limited = (unreduced) => {
    const value = reduced(unreduced);
    if (value.type !== "finite") return value;
    const [numerator, denominator] = [bitLength(value.n), bitLength(value.d)];
    const apart = numerator > denominator ? numerator - denominator : denominator - numerator;
    if (apart > LARGEST_POWER || numerator > 2n * LARGEST_POWER || denominator > 2n * LARGEST_POWER) throw tooFar();
    return value;
  };

  function sum() {
    let value = product();
    for (let sign = take("+", "-"); sign; sign = take("+", "-")) {
      const other = product();
      finiteOf(value, sign);
      finiteOf(other, sign);
      const zeros = value.type === "zero" && other.type === "zero";
      if (zeros && value.negative && other.negative === (sign === "+")) continue; // -0 + -0 and -0 - 0 are -0
      value = limited(sign === "+" ? plus(value, other) : minus(value, other));
    }
    return value;
  }
  function product() {
    let value = signed();
    for (let sign = take("*", "/"); sign; sign = take("*", "/")) {
      const other = signed();
      finiteOf(value, sign);
      finiteOf(other, sign);
      if (sign === "/" && other.type === "zero") throw wrong("it divides by zero; an infinity is written inf");
      if (value.type === "zero" || other.type === "zero") value = zero(value.negative !== other.negative);
      else value = limited(sign === "*" ? times(value, other) : over(value, other));
    }
    return value;
  }
  function signed() {
    let negative = false;
    for (let sign = take("+", "-"); sign; sign = take("+", "-")) negative = negative !== (sign === "-");
    const value = power();
    return negative ? { ...value, negative: !value.negative } : value;
  }
  function power() {
    const base = atom();
    const sign = take("^", "**");
    if (!sign) return base;
    const exponent = finiteOf(deeper(signed), sign);
    finiteOf(base, sign);
    if (under(exponent) !== 1n) throw wrong("an exponent is not an integer");
    const count = top(exponent);
    const even = count % 2n === 0n;
    if (base.type === "zero") {
      if (count < 0n) throw wrong("it divides by zero; an infinity is written inf");
      return count === 0n ? finite(false, 1n) : zero();
    }
    if (base.n === base.d) return finite(base.negative && !even, 1n);
    const steps = count < 0n ? -count : count;
    const longest = [base.n, base.d].map((x) => bitLength(x) - 1n);
    if (steps * (longest[0] > longest[1] ? longest[0] : longest[1]) > 2n * LARGEST_POWER) throw tooFar();
    const [n, d] = count < 0n ? [base.d, base.n] : [base.n, base.d];
    return limited(finite(base.negative && !even, n ** steps, d ** steps));
  }
  function atom() {
    if (take("(")) {
      const value = deeper(sum);
      if (!take(")")) throw wrong("a parenthesis is not closed");
      return value;
    }
    if (at === tokens.length) throw wrong(tokens.length ? "it ends too early" : "it is empty");
    const [kind, token] = tokens[at];
    if (kind === "operator") throw wrong(`${repr(token)} is not expected there`);
    at += 1;
    if (kind === "special") return token === "nan" ? nan() : infinity();
    const sixteen = kind === "hexadecimal";
    const [digits, power = ""] = token.replace(/_/g, "").replace(/^0x/, "").split(sixteen ? "p" : "e");
    const [whole, part = ""] = digits.split(".");
    const significand = BigInt((sixteen ? "0x" : "") + whole + part);
    if (!significand) return zero();
    const largest = sixteen ? LARGEST_POWER : LARGEST_DECIMAL_POWER;
    const said = power ? BigInt(power.replace("+", "")) : 0n;
    if (said > largest || -said > largest) throw tooFar();
    const exponent = said - BigInt(part.length * (sixteen ? 4 : 1));
    const base = sixteen ? 2n : 10n;
    if (exponent < 0n) return limited(fraction(significand, base ** -exponent));
    return limited(finite(false, significand * base ** exponent));
  }

  const value = sum();
  if (at < tokens.length) throw wrong(`${repr(tokens[at][1])} is not expected there`);
  return value;
}

// ----------------------------------------------------------------------------------------------------------- formats

const plainName = (name) => strip(name).toLowerCase().replace(/^torch\./, "").replace(/^np\./, "")
  .replace(new RegExp(`[${SPACE}_-]`, "g"), "");
const isNamed = (name) => (f) => [f.name, ...f.aliases].some((each) => plainName(each) === name);

// A format by its name, an alias, or its fields: e5m7, e4m3ieee, e5m10b20, e3m2fnuz.
function formatNamed(text) {
  const plain = plainName(text);
  const named = Object.values(formats).find(isNamed(plain));
  if (named) return named;
  const fields = plain.match(/^(?:float[0-9]+)?e([0-9]+)m([0-9]+)(?:b([0-9]+))?(ieee|fnuz|fn|finite)?(nan)?$/);
  if (!fields || (fields[5] && fields[4] !== "fn")) throw new RangeError(unknownFormat(strip(text), plain));
  return custom(BigInt(fields[1]), BigInt(fields[2]), fields[4] ?? "ieee", fields[3] ? BigInt(fields[3]) : null);
}

function custom(exponent, mantissa, kind, bias) {
  const limits = [["exponent", exponent, 1n, 11n], ["mantissa", mantissa, BigInt(kind === "fn"), 52n]];
  for (const [name, value, low, high] of limits) {
    if (value < low || value > high) {
      throw new RangeError(
        `Expected ${name} to be from ${low} to ${high} bits, so that float64 holds every value, but got ${value}`);
    }
  }
  if (kind === "ieee" && exponent === 1n) {
    throw new RangeError(
      "Expected exponent to be 2 bits or more with kind='ieee', but got 1: one bit leaves no normal numbers");
  }
  const usual = (1n << (exponent - 1n)) - BigInt(kind !== "fnuz");
  const chosen = bias ?? usual;
  let name = `e${exponent}m${mantissa}${chosen === usual ? "" : `b${chosen}`}${kind === "ieee" ? "" : kind}`;
  if (["e4m3", "e2m3", "e3m2", "e2m1"].includes(name)) name += kind;
  if (["e2m3fn", "e3m2fn", "e2m1fn"].includes(name)) name += "-nan";
  const title = `${1n + exponent + mantissa}-bit format of your own: ${kinds[kind]}`;
  const made = format({
    name, title, exponent: Number(exponent), mantissa: Number(mantissa), bias: chosen, kind, aliases: [], hardware: [],
    container: null,
  });
  if (made.emin - mantissa < -1074n || made.emax > 1023n) {
    throw new RangeError(
      `Expected values within float64's range, 2^-1074 to 2^1023, but got 2^${1n - chosen - mantissa} to ` +
      `2^${made.emax}: choose a smaller exponent or another bias than ${chosen}`);
  }
  const same = (f) => f.e === made.e && f.m === made.m && BigInt(f.bias) === chosen && f.kind === kind;
  return Object.values(formats).find(same) ?? made;
}

function unknownFormat(text, plain) {
  if (ambiguous[plain]) {
    const names = ambiguous[plain].map(repr);
    return `format ${repr(text)} is ambiguous: choose ${names.slice(0, -1).join(", ")} or ${names.at(-1)}`;
  }
  const scored = Object.values(formats).flatMap((f) => [f.name, ...f.aliases].map((name) => [plainName(name), f.name]))
    .map(([name, of]) => [similarity(name, plain), name, of]).filter(([ratio]) => ratio >= 0.6);
  const best = scored.reduce((a, b) => (!a || b[0] > a[0] || (b[0] === a[0] && b[1] > a[1]) ? b : a), null);
  return `unknown format ${repr(text)}; ${best ? `did you mean ${repr(best[2])}? C` : "c"}hoose from ` +
    `${Object.keys(formats).join(", ")}, their aliases, and fields of your own such as 'e5m7'`;
}

// The ratio of Python's difflib.SequenceMatcher: twice the signs in matching blocks, of the signs of both.
function similarity(a, b) {
  const matched = (a, b) => {
    let [size, i, j] = [0, 0, 0];
    let before = [];
    for (let x = 0; x < a.length; x++) {
      const now = [];
      for (let y = 0; y < b.length; y++) {
        if (a[x] !== b[y]) continue;
        now[y] = (before[y - 1] ?? 0) + 1;
        if (now[y] > size) [size, i, j] = [now[y], x - now[y] + 1, y - now[y] + 1];
      }
      before = now;
    }
    return size && size + matched(a.slice(0, i), b.slice(0, j)) + matched(a.slice(i + size), b.slice(j + size));
  };
  return a.length + b.length ? (2 * matched(a, b)) / (a.length + b.length) : 1;
}
