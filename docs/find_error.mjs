// Finds the messages of errors.md that a pasted error text is one of, or comes near to.

// Whether the parts of a message are in a text, one after the other.
function contains(text, parts) {
  let at = 0;
  return parts.every((part) => {
    const found = text.indexOf(part, at);
    at = found + part.length;
    return found >= 0;
  });
}

const words = (text) => new Set(text.toLowerCase().match(/[a-z_]{3,}/g) ?? []);

// Indices of messages, best first: those that the text contains, with anything for "…"; otherwise those that share most
// of their words with it.
export function ranked(text, messages, most = 5) {
  const flat = text.replace(/\s+/g, " ").trim();
  const exact = messages.flatMap((message, i) => contains(flat, message.split("…")) ? [i] : []);
  const literal = (i) => messages[i].replaceAll("…", "").length;
  if (exact.length) return exact.sort((a, b) => literal(b) - literal(a)).slice(0, most);
  const given = words(flat);
  const shares = messages.map((message, i) => {
    const own = [...words(message)];
    const both = own.filter((word) => given.has(word)).length;
    return [both / Math.max(3, Math.sqrt(own.length * given.size)), i];
  });
  return shares.filter(([share]) => share >= 0.3).sort((a, b) => b[0] - a[0]).slice(0, most).map(([, i]) => i);
}

if (typeof document$ !== "undefined") {
  document$.subscribe(() => {
    const field = document.querySelector("#pasted-error");
    if (!field) return;
    const items = [...document.querySelectorAll(".md-content li")].filter((one) => one.querySelector("code"));
    const messages = items.map((one) => one.querySelector("code").textContent.trim());
    const show = document.querySelector("#found-errors");
    field.addEventListener("input", () => {
      const found = field.value.trim().length < 4 ? [] : ranked(field.value, messages);
      const none = field.value.trim().length < 4 ? "" : "None of halfstep's messages is like it.";
      show.replaceChildren(...(found.length ? found.map((i) => items[i].cloneNode(true)) : [none]));
    });
  });
}
