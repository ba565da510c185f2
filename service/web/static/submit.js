// A new job: out of an example, a file, or another job; as a form or as the file itself.
import { ApiError, call, get, jobPath, send as sent } from "./api.js";
import { fill, h, newId, put, say } from "./dom.js";
import { Form, withoutDefaults } from "./form.js";
import { bytesText } from "./format.js";
import { listed, packed } from "./package.js";
import { CORE_SCHEMA, dump, load } from "./vendor/js-yaml.esm.min.mjs";

const EXAMPLES = ["quickstart", "bert", "local-steps", "muon", "resnet"];
const LONGEST = 1 << 20;
/** As the service takes them (service/bodies.py): a few lines of YAML can stand for more than a form can show. */
const MOST_FIELDS = 1000, MOST_VALUES = 5000;
const VALIDATE = "/v1/jobs:validate";

const STARTS = {
  now: "It would start now.",
  queued: "It would wait for places.",
  handed_over: "It would go to the cluster at once, which brings machines or has a queue of its own.",
  unknown: "Whether it would start now is not known: the launcher does not answer.",
};

/** What somebody has written and not submitted, for when they (and nobody else) come back: after a session that ran out, above all. */
let draft = null;

export function view(place, route, { me, failed }) {
  const stopped = new AbortController();
  make(place, route.parameters, me.name, stopped.signal).catch((error) => { if (!stopped.signal.aborted) failed(error); });
  return { stop: () => stopped.abort() };
}

async function make(place, parameters, who, signal) {
  const title = h("h1", {}, "Submit a job");
  put(place, title);
  const document_ = await get("openapi.json", { signal });
  const problems = h("div", { role: "alert", tabindex: "-1" }), note = h("p", { class: "help", role: "status" });
  const example = h("select", { id: newId("example") }, h("option", { value: "" }, "choose"), EXAMPLES.map((one) => h("option", { value: one }, one)));
  const file = h("input", { id: newId("file"), type: "file", accept: ".yaml,.yml,.json" });
  const folder = h("input", { id: newId("folder"), type: "file", webkitdirectory: true });
  const bar = h("progress", { max: "1", hidden: true, "aria-label": "Packed and sent" });
  const text = h("textarea", { class: "file", id: newId("text"), spellcheck: "false", autocomplete: "off", "aria-label": "The job file, YAML or JSON" });
  const body = h("div");
  const radio = (value, words) => { const id = newId("as"); return [h("input", { type: "radio", name: "as", id, value, checked: value === "form", on: { change: turn } }), h("label", { for: id }, words)]; };
  const submit = h("button", { class: "main" }, "Submit");
  const check = Object.hasOwn(document_.paths ?? {}, VALIDATE) ? h("button", { type: "button", on: { click: () => send(true) } }, "Check") : null;
  let as = "form", key = null, form = null, written = "", busy = false, submitted = false;
  const formElement = h("form", { class: "submit", novalidate: true, on: { submit: (event) => { event.preventDefault(); send(false); } } },
    h("p", { class: "filters" }, h("label", { for: example.id }, "Begin with"), example, h("label", { for: file.id }, "or a file"), file,
      h("label", { for: folder.id }, "and a script's folder"), folder, bar),
    h("p", { class: "filters", role: "group", "aria-label": "Show the job" }, radio("form", "as a form"), radio("file", "as a file")),
    note, problems, body, h("p", { class: "actions" }, check, submit));
  put(place, formElement, h("p", { class: "help" }, "Of a script's folder goes what .gitignore and .rayignore do not leave out, as with ", h("code", {}, "thinwire submit train.py --workers 4"),
    ", but for empty folders; what begins with #! can be executed. At the service it is kept while a job names it."));

  example.addEventListener("change", async () => {
    if (!example.value) return;
    try { take(await get(`web/examples/${example.value}.yaml`, { as: "text", signal })); } catch (error) { refuse([error.message]); }
  });
  file.addEventListener("change", async () => {
    const chosen = file.files[0];
    if (!chosen) return;
    example.value = "";
    if (chosen.size > LONGEST) refuse([`${chosen.name} has ${chosen.size} bytes; a job file may have at most ${LONGEST}`]);
    else {
      try {
        const content = new TextDecoder("utf-8", { fatal: true }).decode(await chosen.arrayBuffer());
        say(note, `From ${chosen.name}.`);
        take(content);
      } catch (error) {
        refuse([`${chosen.name} cannot be read: ${error instanceof TypeError ? "it is not UTF-8 text" : error.message}`]);
      }
    }
    file.value = ""; // the same file, mended, can be chosen again
  });
  text.addEventListener("input", () => { key = null; });
  let packing = null;
  folder.addEventListener("change", async () => {
    const files = [...folder.files];
    folder.value = ""; // the same folder, mended, can be chosen again
    packing?.abort();
    const mine = packing = new AbortController(), within = AbortSignal.any([signal, mine.signal]);
    fill(problems);
    submit.disabled = true;
    try {
      const job = await withPackage(files, within);
      if (!within.aborted && job) show(job);
    } catch (error) {
      if (!within.aborted) { say(note, ""); refuse([error.message]); }
    } finally {
      if (packing === mine) { bar.hidden = true; submit.disabled = busy; }
    }
  });

  /** The job that is shown, with the package of this folder, which the service has then. */
  async function withPackage(files, within) {
    const found = await listed(files);
    const all = 2 * found.bytes || 1, gone = (bytes) => { bar.value = bytes / all; };
    gone(0);
    bar.hidden = false;
    say(note, `Packing ${found.entries.length} files of ${found.name}.`);
    const { blob, sha256 } = await packed(found, gone, within);
    const left = found.leftOut.length > 5 ? [...found.leftOut.slice(0, 5), `${found.leftOut.length - 5} more`] : found.leftOut;
    const words = `${found.entries.length} ${found.entries.length === 1 ? "file" : "files"} of ${found.name}: ${bytesText(found.bytes)}, ${bytesText(blob.size)} as a zip.${left.length ? ` Left out: ${left.join(", ")}.` : ""}`;
    const path = `v1/packages/${sha256}`;
    const known = await get(path, { signal: within }).catch((error) => { if (error.status === 404) return null; throw error; });
    if (known === null) {
      say(note, `Sending ${words}`);
      await sent(path, blob, "application/zip", { sent: (bytes) => gone(found.bytes * (1 + bytes / blob.size)), signal: within });
    }
    say(note, `${known === null ? "Sent" : "The service has this already:"} ${words}`);
    const job = as === "form" ? form.value : text.value.trim() ? read(text.value) : {}; // refused there where it is no job
    if (job === null) return null;
    const script = job.recipe?.name === "script", names = found.entries.map(([name]) => name);
    const { working_dir: _, entry: named, ...recipe } = script ? job.recipe : { name: "script" };
    const entry = names.includes(named) ? named : entryOf(names);
    if (!entry) say(note, `${note.textContent} Which file is the script? Name it in recipe.entry.`);
    const name = job.name ?? ((entry ?? found.name).replace(/^.*\/|\.py$/g, "").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "job");
    return { ...(script ? job : others(job)), name, recipe: { ...recipe, ...(entry ? { entry } : {}), package: sha256 } };
  }

  const origin = parameters.get("continue") ?? parameters.get("like");
  const asked = parameters.toString();
  if (draft?.asked === asked && draft.who === who) {
    as = draft.as;
    formElement.querySelector(`[value=${as}]`).checked = true;
    show(draft.value, draft.text);
    say(note, "This is what you had begun. An example or a file takes its place.");
  } else if (origin) {
    const job = await get(jobPath(origin), { signal });
    const spec = withoutDefaults(document_, job.spec ?? {});
    if (parameters.has("continue")) {
      spec.start = { job: origin };
      say(title, `Continue from ${origin}`);
      say(note, `It begins with the newest checkpoint of ${origin}, with all that is in it. ${job.steps ? `That job was to make ${job.steps} steps: ask for more if it is to train longer.` : ""}`);
    } else say(title, `Another job like ${origin}`);
    show(spec);
  } else show({});
  signal.addEventListener("abort", () => {
    const value = form.value;
    draft = submitted || (as === "form" && !Object.keys(value).length) ? null : { asked, who, as, ...(as === "form" ? { value } : { value: {}, text: text.value }) };
  });
  if (parameters.has("continue")) form.at("steps")?.control.focus();

  /** A text, of a file or an example: its comments stay as long as it is shown as a file. */
  function take(content) {
    fill(problems);
    const found = read(content);
    if (found === null) { text.value = content; as = "file"; formElement.querySelector("[value=file]").checked = true; fill(body, text); return; }
    show(found, content);
  }

  function show(value, content) {
    key = null;
    if (!form) form = new Form(document_, value, () => { key = null; }); else form.show(value);
    written = content ?? "";
    text.value = content ?? yaml(value);
    text.shown = JSON.stringify(form.value);
    fill(body, as === "form" ? form.element : text);
  }

  /** The other way to show it. */
  function turn(event) {
    const to = event.target.value;
    fill(problems);
    if (to === "form") {
      const found = read(text.value);
      if (found === null) { event.target.checked = false; formElement.querySelector("[value=file]").checked = true; return; }
      form.show(found);
      written = text.value;
      text.shown = JSON.stringify(form.value);
    } else if (JSON.stringify(form.value) !== text.shown) text.value = yaml(form.value);
    else text.value = written || yaml(form.value);
    as = to;
    fill(body, as === "form" ? form.element : text);
  }

  function read(content) {
    try {
      const found = load(content, { schema: CORE_SCHEMA });
      if (found === null || typeof found !== "object" || Array.isArray(found)) throw new Error("it holds no mapping of fields");
      let size = 0, values = 0; // as they grow
      JSON.stringify(found, (_, value) => {
        if (typeof value === "number" && !Number.isFinite(value)) throw new Error(`it holds ${value}, which JSON cannot carry`);
        size += typeof value === "string" ? value.length : 1;
        values += 1;
        if (values > MOST_VALUES) throw new Error(`it has more than ${MOST_VALUES} values; no job has so many`);
        if (size > LONGEST) throw new Error(`it has more than ${LONGEST} characters as JSON`);
        const fields = value && typeof value === "object" ? Object.keys(value).length : 0;
        if (fields > MOST_FIELDS) throw new Error(`it has ${fields} fields or values side by side; no part of a job has so many`);
        return value;
      });
      return found;
    } catch (error) {
      refuse([`This is neither YAML nor JSON of a job: ${error.message}`]);
      return null;
    }
  }

  function refuse(words) {
    fill(problems, words.length ? h("div", { class: "problems" }, h("p", {}, words.length === 1 && typeof words[0] === "string" ? words[0] : "It was refused, and nothing was started:"), words.length === 1 && typeof words[0] === "string" ? null
      : h("ul", {}, words.map((one) => h("li", {}, one)))) : null);
    if (words.length) problems.focus();
  }

  async function send(only) {
    const job = as === "form" ? form.value : read(text.value);
    if (job === null || busy) return;
    fill(problems);
    form.refuse([]);
    // The same job with the same key is the same job: pressing twice, or again after an answer was lost, makes no second.
    key ??= Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");
    busy = submit.disabled = true;
    try {
      const found = await call("POST", only ? VALIDATE.slice(1) : "v1/jobs", { body: job, headers: only ? {} : { "Idempotency-Key": key }, signal });
      if (only) say(note, `The service would take it. ${STARTS[found.starts] ?? ""} ${found.reason ?? ""}`);
      else submitted = true;
      if (submitted) location.hash = `#/jobs/${encodeURIComponent(found.id)}`;
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError) || !error.problems.length) refuse([error.message]);
      else {
        if (as === "form") form.refuse(error.problems);
        refuse(error.problems.map((one) => {
          const field = as === "form" ? form.at(one.path) : null;
          const where = one.path || "the whole job", value = one.value === null || one.value === undefined ? "" : ` = ${JSON.stringify(one.value)}`;
          return [field ? h("button", { type: "button", on: { click: () => go(field) } }, where) : h("code", {}, where), `${value}: ${one.message}`];
        }));
      }
    } finally {
      busy = submit.disabled = false;
    }
  }

  function go(field) {
    for (let around = field.element.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
    field.control?.focus();
  }
}

/** What of another kind of job also fits one of a script. */
const others = ({ name, workers, labels, priority }) => Object.fromEntries(Object.entries({ name, workers, labels, priority }).filter(([, value]) => value !== undefined));

/** Which file of a folder is the script, where that is plain. */
function entryOf(names) {
  const top = names.filter((name) => /^[^/]+\.py$/.test(name));
  return top.length === 1 ? top[0] : top.find((name) => name === "train.py") ?? top.find((name) => name === "main.py");
}

const yaml = (value) => (Object.keys(value).length ? dump(value, { lineWidth: 110 }) : "");
