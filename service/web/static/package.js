// The folder of a script as a package: a zip of what is not ignored, as thinwire/cli/packing.py makes it. What a browser
// does not tell is missing: empty folders, and which files can be executed (a file that begins with #! can).
import { bytesText } from "./format.js";
import { sha256 as sha2 } from "./vendor/sha2.js";

/** As in thinwire/contract/packages.py. */
export const MOST_BYTES = 100 * 2 ** 20;
export const MOST_ENTRIES = 50_000;
export const MOST_UNPACKED_BYTES = 2 ** 30;
const MOST_RATIO = 100;
const MOST_NAME_BYTES = 1024, MOST_PART_BYTES = 255;
const ALWAYS = new Set([".git", ".hg", ".venv", "venv", "__pycache__"]);
const KINDS = [".gitignore", ".rayignore"];
const STEP = 1 << 20;
const WAYS_OUT = "Leave out what is no code by .gitignore or .rayignore, or read data from where it is";
const encoder = new TextEncoder();

/** The folder cannot be made into a package; the message says why and what to do. */
export class Unpackable extends Error {}

/** files: as an <input webkitdirectory> has them. Resolves with {name, entries: [[name, file], ...], leftOut: [name, ...], bytes}. */
export async function listed(files) {
  if (!files.length) throw new Unpackable("The folder holds no file, or the browser may not read it.");
  const top = { files: new Map(), folders: new Map() };
  for (const file of files) {
    const [, ...parts] = file.webkitRelativePath.split("/");
    let folder = top;
    for (const part of parts.slice(0, -1)) {
      if (!folder.folders.has(part)) folder.folders.set(part, { files: new Map(), folders: new Map() });
      folder = folder.folders.get(part);
    }
    folder.files.set(parts.at(-1), file);
  }
  const found = { name: files[0].webkitRelativePath.split("/")[0], entries: [], leftOut: [], bytes: 0 };
  await walk(found, top, "", KINDS.map(() => []));
  if (found.bytes > MOST_UNPACKED_BYTES) throw tooLarge(found, `has ${bytesText(found.bytes)}`, bytesText(MOST_UNPACKED_BYTES));
  found.entries.sort(([one], [other]) => (one < other ? -1 : 1));
  if (!found.entries.length) throw new Unpackable(`All of ${found.name} is left out by .gitignore or .rayignore.`);
  return found;
}

async function walk(found, folder, path, above) {
  const kinds = await Promise.all(KINDS.map(async (name, at) => {
    const file = folder.files.get(name);
    return file ? [...above[at], { path, patterns: patterns(await text(file)) }] : above[at];
  }));
  const isOut = (name) => kinds.some((known) => {
    for (const { path: from, patterns: of } of known.toReversed()) {
      const last = of.findLast((one) => one.matches(name.slice(from.length)));
      if (last) return last.out;
    }
    return false;
  });
  for (const [part, file] of folder.files) {
    const name = path + part;
    if (ALWAYS.has(part) || isOut(name)) { found.leftOut.push(name); continue; }
    const odd = oddName(name);
    if (odd) throw new Unpackable(`${JSON.stringify(name)} ${odd}: give it another name, or leave it out in .rayignore`);
    found.entries.push([name, file]);
    found.bytes += file.size;
    if (found.entries.length > MOST_ENTRIES) throw tooLarge(found, `has more than ${MOST_ENTRIES} files`, `${MOST_ENTRIES} files`);
  }
  for (const [part, inner] of folder.folders) {
    if (ALWAYS.has(part) || isOut(`${path}${part}/`)) found.leftOut.push(path + part);
    else await walk(found, inner, `${path}${part}/`, kinds);
  }
}

/** Why a name may not stand in a package, to stand after it; null where it may. */
function oddName(name) {
  if (/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/u.test(name) || /[\ud800-\udfff]/u.test(name)) return "holds characters that cannot be printed";
  if (encoder.encode(name).length > MOST_NAME_BYTES) return `is longer than ${MOST_NAME_BYTES} bytes`;
  if (name.includes("\\")) return "holds a backslash";
  if (name[1] === ":") return "is an absolute path";
  if (name.split("/").some((part) => encoder.encode(part).length > MOST_PART_BYTES)) return `has a part that is longer than ${MOST_PART_BYTES} bytes`;
  return null;
}

function tooLarge(found, what, most) {
  const sizes = new Map();
  for (const [name, file] of found.entries) {
    const top = name.replace(/\/.*/s, "/");
    sizes.set(top, (sizes.get(top) ?? 0) + file.size);
  }
  const largest = [...sizes].sort(([, one], [, other]) => other - one).slice(0, 5).map(([name, size]) => `${name} (${bytesText(size)})`).join(", ");
  return new Unpackable(`${found.name} ${what}; a package may have ${most}. The largest: ${largest}. ${WAYS_OUT}.`);
}

const text = async (file) => (await file.text()).replace(/^\ufeff/, "");

// What git ignores

/** The lines of an ignore file that say something, as git reads them: {out, matches(path)}; a folder's path ends with a slash. */
export function patterns(content) {
  return content.split("\n").map((line) => pattern(line.replace(/\r$/, ""))).filter(Boolean);
}

function pattern(line) {
  if (line.startsWith("#") || /^! *$|(?<!\\)(\\\\)*\\$/.test(line)) return null;
  let glob = line.replace(/((?:^|[^\\])(?:\\\\)*) +$/, "$1");
  const out = !glob.startsWith("!");
  if (!out) glob = glob.slice(1);
  const folders = glob.endsWith("/");
  if (folders) glob = glob.slice(0, -1);
  if (!glob) return null;
  const anchored = glob.includes("/");
  const parts = glob.replace(/^\//, "").split("/");
  let made = anchored ? "^" : "^(?:.*/)?";
  parts.forEach((part, at) => {
    const last = at === parts.length - 1;
    if (part === "**") made += last ? (at ? ".+" : ".*") : "(?:.*/)?";
    else made += globbed(part) + (last ? "" : "/");
  });
  const right = new RegExp(`${made}$`, "su");
  return { out, matches: (path) => (path.endsWith("/") ? right.test(path.slice(0, -1)) : !folders && right.test(path)) };
}

/** A part of a pattern between two slashes, as a regular expression. */
function globbed(part) {
  let made = "";
  const quoted = (one) => one.replace(/[\\^$.*+?()[\]{}|/]/gu, "\\$&"), inClass = (one) => one.replace(/[\\^\]-]/gu, "\\$&");
  const all = [...part];
  for (let at = 0; at < all.length; at += 1) {
    const one = all[at];
    if (one === "\\" && at + 1 < all.length) made += quoted(all[++at]);
    else if (one === "*") { while (all[at + 1] === "*") at += 1; made += "[^/]*"; }
    else if (one === "?") made += "[^/]";
    else if (one === "[") {
      let end = at + 1;
      if (all[end] === "!" || all[end] === "^") end += 1;
      if (all[end] === "]") end += 1;
      while (end < all.length && all[end] !== "]") end += all[end] === "\\" ? 2 : 1;
      if (end >= all.length) { made += "\\["; continue; }
      const not = all[at + 1] === "!" || all[at + 1] === "^", inside = all.slice(at + (not ? 2 : 1), end);
      let chosen = "";
      for (let place = 0; place < inside.length; place += 1) {
        if (inside[place] === "\\" && place + 1 < inside.length) chosen += inClass(inside[++place]);
        else chosen += inside[place] === "-" && place && place < inside.length - 1 ? "-" : inClass(inside[place]);
      }
      made += `(?!/)[${not ? "^" : ""}${chosen}]`;
      at = end;
    } else made += quoted(one);
  }
  return made;
}

// The zip

/** The package: {blob, sha256}. progress(bytes): how many bytes of the files have been packed. Raises Unpackable. */
export async function packed(found, progress, signal) {
  const parts = [], directory = [];
  let start = 0, done = 0;
  for (const [name, file] of found.entries) {
    let one;
    try {
      one = await deflated(file, (bytes) => progress(done += bytes), signal);
    } catch (error) {
      signal.throwIfAborted();
      throw new Unpackable(`${name} cannot be read: it was changed or removed meanwhile, or may not be read (${error.message})`);
    }
    const bytes = encoder.encode(name), mode = (0o100000 | (one.runs ? 0o755 : 0o644)) * 2 ** 16;
    // Version, flags (bit 11: UTF-8), deflated, 1980-01-01, sum, sizes, length of the name.
    const shared = [[20, 2], [/^[\x00-\x7f]*$/.test(name) ? 0 : 0x800, 2], [8, 2], [0, 2], [0x21, 2], [one.crc, 4], [one.blob.size, 4], [file.size, 4], [bytes.length, 2], [0, 2]];
    parts.push(record(0x04034b50, shared), bytes, one.blob);
    directory.push(record(0x02014b50, [[0x0314, 2], ...shared, [0, 2], [0, 2], [0, 2], [mode, 4], [start, 4]]), bytes);
    start += 30 + bytes.length + one.blob.size;
    if (start > MOST_BYTES) throw tooLarge(found, `has more than ${bytesText(MOST_BYTES)} as a zip`, bytesText(MOST_BYTES));
  }
  const length = directory.reduce((sum, part) => sum + part.byteLength, 0), count = found.entries.length;
  const blob = new Blob([...parts, ...directory, record(0x06054b50, [[0, 2], [0, 2], [count, 2], [count, 2], [length, 4], [start, 4], [0, 2]])]);
  if (blob.size > MOST_BYTES) throw tooLarge(found, `has ${bytesText(blob.size)} as a zip`, bytesText(MOST_BYTES));
  if (found.bytes > Math.max(MOST_BYTES, MOST_RATIO * start)) throw new Unpackable(`${found.name} has ${bytesText(found.bytes)}, and ${bytesText(start)} as a zip: what becomes so small is no code. ${WAYS_OUT}.`);
  return { blob, sha256: await sha256(blob, signal) };
}

function record(signature, fields) {
  const made = new DataView(new ArrayBuffer(4 + fields.reduce((sum, [, size]) => sum + size, 0)));
  made.setUint32(0, signature, true);
  let at = 4;
  for (const [value, size] of fields) { if (size === 2) made.setUint16(at, value, true); else made.setUint32(at, value, true); at += size; }
  return made;
}

async function deflated(file, progress, signal) {
  const stream = new CompressionStream("deflate-raw"), writer = stream.writable.getWriter();
  const blob = new Response(stream.readable).blob();
  blob.catch(() => {}); // its error is that of the writer, below
  let crc = -1, runs = false, size = 0;
  try {
    for (let at = 0; at < file.size; at += STEP) {
      signal.throwIfAborted();
      const part = new Uint8Array(await file.slice(at, at + STEP).arrayBuffer());
      if (at === 0) runs = part[0] === 0x23 && part[1] === 0x21;
      for (let place = 0; place < part.length; place += 1) crc = CRC[(crc ^ part[place]) & 0xff] ^ (crc >>> 8);
      size += part.length;
      await writer.write(part);
      progress(part.length);
    }
    if (size !== file.size) throw new Error("it is shorter than it was");
    await writer.close();
  } catch (error) {
    writer.abort(error).catch(() => {});
    throw error;
  }
  return { blob: await blob, crc: (crc ^ -1) >>> 0, runs };
}

const CRC = Int32Array.from({ length: 256 }, (_, byte) => {
  let sum = byte;
  for (let bit = 0; bit < 8; bit += 1) sum = sum & 1 ? 0xedb88320 ^ (sum >>> 1) : sum >>> 1;
  return sum;
});

// The hash, by a library: browsers lend theirs (crypto.subtle) to pages that came over TLS alone, and not in parts.

/** SHA-256 of a blob, in hexadecimal digits. */
export async function sha256(blob, signal) {
  const hash = sha2.create();
  for (let at = 0; at < blob.size; at += STEP) {
    signal?.throwIfAborted();
    hash.update(new Uint8Array(await blob.slice(at, at + STEP).arrayBuffer()));
  }
  return [...hash.digest()].map((one) => one.toString(16).padStart(2, "0")).join("");
}
