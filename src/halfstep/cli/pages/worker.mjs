// Python in the browser: Pyodide, and the modules of halfstep that answer. It is cut and compiled when the site is built.

// loadPyodide waits for ever where its .wasm is missing.
async function load() {
  const reply = await fetch("pyodide/pyodide.asm.wasm", { method: "HEAD" });
  if (!reply.ok) throw new Error(`pyodide.asm.wasm: HTTP ${reply.status}`);
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const [python, modules] = await Promise.all([loadPyodide(), fetch("halfstep.zip")]);
  if (!modules.ok) throw new Error(`halfstep.zip: HTTP ${modules.status}`);
  python.unpackArchive(await modules.arrayBuffer(), "zip");
  const ask = python.runPython("import json\nfrom halfstep.cli.pages.answers import answer\nlambda text: json.dumps(answer(json.loads(text)))");
  postMessage({ loaded: true });
  return ask;
}

const ready = load();
onmessage = async ({ data }) => {
  try {
    const ask = await ready;
    postMessage({ answer: ask(data) });
  } catch (error) {
    postMessage({ failure: `Python was not loaded or failed: ${error.message.trim().split("\n").at(-1)}` });
  }
};
