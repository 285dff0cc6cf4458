// What the pages of the site need of Python, in Pyodide's own version of it: node cut_python.mjs PYODIDE REQUESTS SITE
// answers the requests of a JSON file, writes the modules of the standard library that this imported, compiled, to
// SITE/pyodide/python_stdlib.zip, compiles SITE/halfstep.zip, and prints the answers, for a comparison with CPython's.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [pyodide, requests, site] = process.argv.slice(2).map((name) => path.resolve(name));
const { loadPyodide } = await import(pathToFileURL(`${pyodide}/pyodide.mjs`));
const python = await loadPyodide();
const read = (file) => new Uint8Array(fs.readFileSync(file));
python.unpackArchive(read(`${site}/halfstep.zip`), "zip");
python.FS.writeFile("/library.zip", read(`${pyodide}/python_stdlib.zip`));
python.FS.writeFile("/halfstep.zip", read(`${site}/halfstep.zip`));
python.globals.set("requests", fs.readFileSync(requests, "utf8"));
const answers = python.runPython(`
import importlib._bootstrap_external as external, json, sys, zipfile
from halfstep.cli.pages.answers import answer

answers = json.dumps([answer(request) for request in json.loads(requests)])
import difflib, linecache, textwrap, traceback, warnings  # for what goes wrong

files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
imported = {file.partition(".zip/")[2] for file in files if ".zip/" in file}
imported |= {f"encodings/{name}.py" for name in ("__init__", "aliases", "ascii", "cp437", "latin_1", "utf_8")}

def compiled(source, keep):
    archive = zipfile.ZipFile(source)
    names = [name for name in archive.namelist() if keep(name)]
    with zipfile.ZipFile(source + ".cut", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name in names:
            content = archive.read(name)
            if name.endswith(".py"):
                code = compile(content, name, "exec", dont_inherit=True, optimize=2)
                name, content = name + "c", bytes(external._code_to_hash_pyc(code, bytes(8), False))
            out.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED, 9)

compiled("/library.zip", imported.__contains__)
compiled("/halfstep.zip", lambda name: True)
answers
`);
fs.writeFileSync(`${site}/pyodide/python_stdlib.zip`, python.FS.readFile("/library.zip.cut"));
fs.writeFileSync(`${site}/halfstep.zip`, python.FS.readFile("/halfstep.zip.cut"));
process.stdout.write(answers);
