// The frame: who is signed in, which view the address names, and whether what is shown is of now.
import { ApiError, call, get, query, SignedOut, Unreachable, watcher } from "./api.js";
import { project } from "./project.js";
import { fill, h, put, say } from "./dom.js";
import { clockText, now, timeText } from "./format.js";

const VIEWS = {
  "": () => import("./jobs.js"),
  jobs: () => import("./job.js"),
  compare: () => import("./compare.js"),
  submit: () => import("./submit.js"),
  people: () => import("./people.js"),
};
/** Why a sign-on by an issuer has come to nothing: the words of the address that the service sends the browser back to. */
const SIGN_ON = {
  gone: "does not answer now, or not as it should: try again, or sign in with a token.",
  refused: "has refused the sign-on.",
  state: "has sent back another sign-on than the one that this browser began: try again, and allow cookies for this address.",
  token: "has sent a proof that this service does not take: its log says why.",
  person: "knows you, and you may do nothing here: you are in no group that has a role, or were blocked. Ask the operator.",
  none: "signs nobody on for this page: use a token.",
};
const content = document.getElementById("content");
const stale = document.getElementById("stale");

/** Who is signed in: {name, role, ...}; null where nobody is. */
let me = null;
let current = null;
let turn = 0;
let lastOk = null;
let turned = false;

watcher.ok = () => {
  lastOk = new Date();
  if (stale.textContent) stale.textContent = "";
};
watcher.heard = () => { if (!stale.textContent) lastOk = new Date(); };
watcher.lost = (error) => {
  const since = lastOk ? `stale since ${clockText(lastOk)}: ` : "";
  say(stale, `${since}${error.message}. What is shown is from then; it goes on by itself when the service is back.`);
};
watcher.signedOut = (why) => {
  if (me !== null) leave(me.expires_at && new Date(me.expires_at) <= now() ? "Your session has run out: sign in again." : why);
};

// A browser has one session of a service, whichever of its windows began or ended it.
const windows = new BroadcastChannel(`thinwire ${location.pathname}`);
windows.onmessage = async ({ data }) => {
  if (data === "out") { if (me !== null) leave("You have signed out in another window."); return; }
  try {
    const found = await whoami();
    if (found.name === me?.name && found.role === me.role) { me = found; return; }
    stop();
    me = found;
    frame();
    show();
  } catch (error) {
    failed(error);
  }
};

/** End the view that is shown, and whatever it asks. */
function stop() {
  current?.stop();
  current = null;
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close("no");
}

/** Nobody is signed in any more. */
function leave(why) {
  stop(); // while it is known whose draft it is
  me = null;
  frame();
  signIn(why);
}

function frame() {
  const nav = document.getElementById("nav"), who = document.getElementById("who");
  nav.hidden = who.hidden = me === null;
  if (me === null) { nav.replaceChildren(); who.replaceChildren(); return; }
  const links = [["#/", "Jobs"]];
  if (me.role !== "viewer") links.push(["#/submit", "Submit"]);
  if (me.role === "operator") links.push(["#/people", "People"]);
  fill(nav, links.map(([href, name]) => h("a", { href }, name)),
    me.grafana_url ? h("a", { href: me.grafana_url, rel: "noreferrer" }, "Grafana") : null,
    h("a", { href: "docs" }, "API"));
  fill(who, h("span", { class: "wide" }, `${me.name} (${me.role}${me.project === "default" || me.projects.length > 1 ? "" : `, ${me.project === "*" ? "all projects" : me.project}`})${endsSoon(me)} `), ...projects(), h("button", { type: "button", on: { click: signOut } }, "Sign out"));
}

/** The choice of a project, for who is in several. */
function projects() {
  if (me.projects.length < 2) return [];
  const names = me.project === "*" ? ["", ...me.projects] : me.projects;
  const choice = h("select", { "aria-label": "Project", on: { change: async () => { project.chosen = choice.value; stop(); await enter(); } } },
    names.map((name) => h("option", { value: name }, name || "all projects")));
  choice.value = project.chosen ?? (me.project === "*" ? "" : me.project);
  return [choice, " "];
}

/** Who is signed in, in the project that was chosen, where that is still theirs. */
async function whoami() {
  const found = await get("v1/session");
  if (project.chosen === null || found.projects.includes(project.chosen)) return found;
  project.chosen = null;
  return get("v1/session");
}

function mark(name) {
  for (const link of document.querySelectorAll("#nav a")) {
    const here = link.getAttribute("href") === `#/${name === "jobs" ? "" : name}`;
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
}

/** The view that the address names: #/jobs/ID/logs?rank=1 is the view `jobs` with parts and parameters. */
async function show() {
  const mine = ++turn;
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [name, ...parts] = path.split("/");
  const route = { name, parts: parts.map(unescaped), parameters: new URLSearchParams(search ?? "") };
  if (me === null) { signIn(); return; }
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close("no");
  if (current?.goes?.(route)) { mark(name); return; }
  stop();
  if (!Object.hasOwn(VIEWS, name)) { heading("There is no such page", h("p", {}, h("a", { href: "#/" }, "All jobs"))); return; }
  mark(name);
  try {
    const module = await load(name);
    if (mine !== turn) return;
    content.replaceChildren();
    current = module.view(content, route, { me, failed });
    focusHeading();
  } catch (error) {
    failed(error);
  }
}

async function load(name) {
  try {
    return await VIEWS[name]();
  } catch (error) {
    // What could not be fetched is a TypeError, and does not say why. The service answers, or this raises Unreachable.
    if (error instanceof TypeError) { await get("v1/session"); return VIEWS[name](); }
    throw error;
  }
}

function unescaped(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

function focusHeading() {
  const title = content.querySelector("h1");
  document.title = title ? `${title.textContent} - Thinwire` : "Thinwire";
  // Who turns to another view hears which; at the first one the browser itself reads the page.
  if (title && turned) { title.tabIndex = -1; title.focus({ preventScroll: true }); }
  turned = true;
  scrollTo(0, 0);
}

function heading(title, ...rest) {
  fill(content, h("h1", {}, title), ...rest);
  focusHeading();
}

/** What cannot be mended by waiting, in words; the rest is waited for. */
function failed(error) {
  if (error instanceof SignedOut || error?.name === "AbortError") return;
  stop();
  if (error instanceof Unreachable) { enter(); return; }
  const what = error instanceof ApiError ? error.message : `an error of this page: ${error?.message ?? error}`;
  if (!(error instanceof ApiError)) console.error(error);
  heading(error?.status === 404 ? "Not found" : "This cannot be shown", h("p", { role: "alert" }, what), h("p", {}, h("a", { href: "#/" }, "All jobs")));
}

/** What has become of a sign-on by an issuer, where the service has just sent the browser back from one. Said once. */
function signedOn() {
  const [view, search] = location.hash.split("?", 2);
  const found = new URLSearchParams(search ?? "").get("sign-on");
  if (found !== null) history.replaceState(null, "", view);
  return found;
}

function signIn(why) {
  const mine = ++turn; // a view that is still being loaded is not shown
  stop();
  const error = h("p", { class: "problem", role: "alert", id: "sign-in-problem" }, why ?? null);
  const token = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false", "aria-describedby": "token-help sign-in-problem" });
  const issuer = h("div");
  const form = h("form", { class: "sign-in", on: { submit: begin } },
    h("h1", {}, "Sign in"),
    issuer,
    h("label", { for: "token" }, "Your token"),
    token,
    h("p", { id: "token-help", class: "help" }, "The operator makes one for you with ", h("code", {}, "thinwire token create"),
      "; their own is the file ", h("code", {}, "token"), " in the service's home. The browser keeps a session, and not the token."),
    error,
    h("button", { class: "main" }, "Sign in"));
  fill(content, form);
  document.title = "Sign in - Thinwire";
  turned = false;
  token.focus();
  offer();

  async function offer() {
    const failed = signedOn();
    const view = location.hash.replace(/^#\/?/, "").split("?", 1)[0];
    let found;
    try { found = await get("v1/sign-on"); } catch { return; } // the form says what becomes of a token
    if (mine !== turn || !found.issuer || !found.page_url) return;
    fill(issuer,
      h("a", { href: `v1/sign-on-begin${query({ view })}`, class: "button main", }, `Sign on with ${found.name}`),
      failed === null && found.trouble ? h("p", { class: "help" }, `${found.name} did not answer the last time. A token of this service always signs in.`) : null,
      new URL(found.page_url).host === location.host ? null : h("p", { class: "help" }, `It sends browsers back to ${found.page_url}: open the page there.`));
    if (Object.hasOwn(SIGN_ON, failed ?? "")) say(error, `${found.name} ${SIGN_ON[failed]}`);
  }

  async function begin(event) {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    say(error, "");
    try {
      if (!/^[\x21-\x7e]+$/.test(token.value.trim())) throw new Error("a token is one word of letters, digits, - and _");
      await call("POST", "v1/session", { token: token.value.trim() });
      me = await whoami().catch((problem) => {
        throw problem instanceof SignedOut ? new Error("your browser has not kept the session: allow cookies for this address") : problem;
      });
      token.value = "";
      windows.postMessage("in");
      frame();
      show();
    } catch (problem) {
      button.disabled = false;
      say(error, problem.message);
      token.focus();
      token.select();
    }
  }
}

async function signOut() {
  try {
    await call("DELETE", "v1/session");
  } catch (error) {
    if (!(error instanceof SignedOut)) { watcher.lost(error); return; }
  }
  windows.postMessage("out");
  project.chosen = null;
  const further = me?.issuer_signs_out;
  leave();
  if (further) location.assign("v1/sign-off");
}

/** A warning where the token of this session ends within a week. */
function endsSoon({ token_expires_at: at }) {
  return at && new Date(at) - now() < 7 * 86_400_000 ? `, token ends ${timeText(at)}` : "";
}

/** Ask who is signed in until the service answers, or another view is asked for; then show what the address names. */
async function enter() {
  const mine = ++turn, known = me !== null;
  for (let waitMs = 1000; ; waitMs = Math.min(15_000, waitMs * 2)) {
    try {
      const found = await whoami();
      if (mine !== turn) return;
      me = found;
      break;
    } catch (error) {
      if (mine !== turn || (known && error instanceof SignedOut)) return;
      if (error instanceof SignedOut) break;
      if (!(error instanceof Unreachable)) { failed(error); return; }
      if (waitMs === 1000) heading("The service does not answer", h("p", {}, "The page goes on by itself when it does."));
      await new Promise((resolve) => setTimeout(resolve, waitMs));
      if (mine !== turn) return;
    }
  }
  frame();
  if (me !== null && signedOn() !== null) windows.postMessage("in");
  show();
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment names the view
  content.focus();
});
addEventListener("hashchange", show);
enter();
