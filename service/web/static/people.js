// For an operator: who has which token, and who has changed what.
import { ApiError, call, get, Poller, query } from "./api.js";
import { announce, ask, fill, h, newId, put, say } from "./dom.js";
import { bytesText, timeText } from "./format.js";

const EVERY_MS = 15_000;
const LINES = 50;
const RESOURCES = ["running_jobs", "queued_jobs", "workers", "gpus", "package_bytes", "kept_bytes"];
const amount = (name, value) => (name.endsWith("_bytes") ? bytesText(value) : String(value));

export function view(place, route, { me, failed }) {
  const refused = h("p", { class: "problem", role: "alert" }), made = h("div", { role: "status" });
  const rows = h("tbody"), lines = h("tbody"), older = h("button", { type: "button", hidden: true }, "Older lines");
  const [nameId, roleId, daysId, projectId] = ["name", "role", "days", "project"].map(newId);
  const project = h("input", { id: projectId, placeholder: "your own", autocomplete: "off", spellcheck: "false", size: "12" }), used = h("tbody");
  const name = h("input", { id: nameId, required: true, pattern: "[a-z0-9][a-z0-9._\\-]{0,62}", title: "lower-case letters, digits, dots, dashes", autocomplete: "off", spellcheck: "false" });
  const role = h("select", { id: roleId }, ["user", "viewer", "operator"].map((one) => h("option", { value: one }, one)));
  const days = h("input", { id: daysId, type: "number", min: "0.01", max: "3650", step: "any", placeholder: "never" });
  const head = (...names) => h("thead", {}, h("tr", {}, names.map((one) => h("th", { scope: "col" }, one))));
  put(place, h("h1", {}, "People"), refused,
    h("h2", {}, "Tokens"),
    h("form", { class: "filters", on: { submit: create } }, h("label", { for: nameId }, "For"), name, h("label", { for: roleId }, "Role"), role,
      h("label", { for: daysId }, "Expires after days"), days, h("label", { for: projectId }, "Project"), project, h("button", { class: "main" }, "Make a token")),
    h("p", { class: "help" }, "A viewer reads; a user does everything to jobs, also to those of others; an operator hands out tokens and reads the audit."),
    made,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Tokens" }, h("table", {}, h("caption", { class: "visually-hidden" }, "Tokens"), head("Name", "Role", "Project", "Made", "Last used", "Expires", ""), rows)),
    h("h2", {}, "Projects"),
    h("p", { class: "help" }, "What each uses, and of how much where it has a limit: ", h("code", {}, "thinwire project set"), " changes that."),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Projects" }, h("table", {}, h("caption", { class: "visually-hidden" }, "Projects"), head("Project", ...RESOURCES.map((one) => one.replace("_", " "))), used)),
    h("h2", {}, "Who has changed what"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Audit" }, h("table", {}, h("caption", { class: "visually-hidden" }, "Audit, newest first"), head("Time", "Who", "What", "Of", "From", "Answer"), lines)), older);
  const came = h("tbody"), comers = h("section", { hidden: true },
    h("h2", {}, "Signed on by an issuer"),
    h("p", { class: "help" }, "Who has come by the issuer, with the role that their groups gave them then. Who is blocked is refused at once, whatever token they have."),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "People of the issuer" }, h("table", {}, h("caption", { class: "visually-hidden" }, "People of the issuer"), head("Name", "Role", "First", "Last", "Blocked", ""), came)));
  place.querySelectorAll("h2")[1].before(comers);
  let shownOlder = false, next = null;

  /** A list that comes page after page. */
  async function all(name, signal) {
    const found = [];
    for (let after = null; ;) {
      const part = await get(`v1/${name}${query({ after })}`, { signal });
      found.push(...part[name]);
      after = part.next ?? null;
      if (after === null) return found;
    }
  }

  async function load(signal) {
    const tokens = await all("tokens", signal);
    const shown = JSON.stringify(tokens);
    if (shown !== rows.shown) {
      rows.shown = shown;
      fill(rows, tokens.map((one) => h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, one.role), h("td", {}, one.project === "*" ? "all" : one.project), h("td", {}, `${timeText(one.created_at)} by ${one.created_by}`), h("td", {}, one.last_used_at ? timeText(one.last_used_at) : "never"),
        h("td", {}, one.revoked_at ? `revoked ${timeText(one.revoked_at)}` : one.expires_at ? timeText(one.expires_at) : "never"),
        h("td", {}, one.valid ? h("button", { type: "button", class: "danger", "aria-label": `Revoke ${one.name}`, on: { click: () => revoke(one.name) } }, "Revoke") : ""))));
    }
    const people = me.project === "*" ? await all("people", signal) : [], seen = JSON.stringify(people);
    comers.hidden = people.length === 0;
    if (seen !== came.shown) {
      came.shown = seen;
      fill(came, people.map((one) => h("tr", {}, h("th", { scope: "row", title: `${one.issuer} ${one.subject ?? ""}` }, one.name), h("td", {}, one.role ?? "-"), h("td", {}, timeText(one.first_at)), h("td", {}, one.last_at ? timeText(one.last_at) : "never"),
        h("td", {}, one.blocked_at ? `${timeText(one.blocked_at)} by ${one.blocked_by}` : ""),
        h("td", {}, one.blocked_at ? h("button", { type: "button", "aria-label": `Unblock ${one.name}`, on: { click: () => unblock(one.name) } }, "Unblock")
          : h("button", { type: "button", class: "danger", "aria-label": `Block ${one.name}`, on: { click: () => block(one.name) } }, "Block")))));
    }
    const { quotas } = await get(`v1/quotas`, { signal });
    fill(used, quotas.filter((one) => one.person === null).map((one) => h("tr", {}, h("th", { scope: "row" }, one.project), RESOURCES.map((name) =>
      h("td", {}, amount(name, one.used[name]) + (one.limits[name] === null ? "" : ` of ${amount(name, one.limits[name])}`))))));
    if (!shownOlder) {
      const found = await get(`v1/audit${query({ limit: LINES })}`, { signal });
      next = found.next;
      lines.replaceChildren();
      show(found.lines);
    }
  }

  function show(found) {
    put(lines, found.map((one) => h("tr", {}, h("td", {}, timeText(one.time)), h("th", { scope: "row" }, one.who), h("td", {}, one.what),
      h("td", { class: "words" }, one.job_id ? h("a", { href: `#/jobs/${encodeURIComponent(one.job_id)}` }, one.job_id) : "", one.about ? ` ${one.about}` : ""), h("td", {}, one.address ?? "-"),
      h("td", {}, `${one.status} ${one.status < 400 ? "done" : "refused"}`))));
    older.hidden = next === null;
  }

  older.addEventListener("click", async () => {
    shownOlder = true;
    try {
      const found = await get(`v1/audit${query({ limit: LINES, before: next })}`);
      next = found.next;
      show(found.lines);
    } catch (error) { say(refused, error.message); }
  });

  async function changed(does) {
    say(refused, "");
    try {
      await does();
    } catch (error) {
      say(refused, error instanceof ApiError && error.problems.length ? error.problems.map((one) => `${one.path}: ${one.message}`).join("; ") : error.message);
    }
  }

  async function create(event) {
    event.preventDefault();
    await changed(async () => {
      const body = { name: name.value, role: role.value, ...(days.value ? { days: days.valueAsNumber } : {}), ...(project.value.trim() ? { project: project.value.trim() } : {}) };
      const found = await call("POST", "v1/tokens", { body });
      const close = h("button", { type: "button", on: { click: () => made.replaceChildren() } }, "I have it");
      fill(made, h("p", {}, `The token of ${found.name}. It is shown this once: `), h("p", { class: "token" }, found.token), close);
      name.value = days.value = "";
      close.focus();
      poller.now();
    });
  }

  async function revoke(who) {
    if (!(await ask(`Revoke the token of ${who}?`, h("p", {}, "It is refused at once, and so are its sessions. Jobs of its owner go on."), "Revoke", { danger: true }))) return;
    await changed(async () => {
      await call("DELETE", `v1/tokens/${encodeURIComponent(who)}`);
      announce(`the token of ${who} is revoked`);
      poller.now();
    });
  }

  async function block(who) {
    if (!(await ask(`Block ${who}?`, h("p", {}, "They are refused at once, in all their sessions. Their jobs go on."), "Block", { danger: true }))) return;
    await changed(async () => {
      await call("PUT", `v1/people/${encodeURIComponent(who)}/block`);
      announce(`${who} is blocked`);
      poller.now();
    });
  }

  async function unblock(who) {
    await changed(async () => {
      await call("DELETE", `v1/people/${encodeURIComponent(who)}/block`);
      announce(`${who} is no longer blocked`);
      poller.now();
    });
  }

  const poller = new Poller(load, EVERY_MS, failed).start();
  return { stop() { poller.stop(); } };
}
