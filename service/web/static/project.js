/** Whose jobs are looked at, of who may choose: a project's name, in each window its own; null: the first, or all. */
export const project = {
  get chosen() { return sessionStorage.getItem("thinwire project"); },
  set chosen(name) { if (name) sessionStorage.setItem("thinwire project", name); else sessionStorage.removeItem("thinwire project"); },
};
