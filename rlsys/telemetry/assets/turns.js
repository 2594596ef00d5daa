// A response as turns and folds: who speaks by the turn of each token, what is thought or asked of a tool by its tags.
const TAGS = { think: "thinking", thinking: "thinking", reasoning: "thinking", tool_call: "tool call", tool_response: "tool result" };
const TAG = new RegExp(`<(/?)(${Object.keys(TAGS).join("|")})>`, "g");

// [{kind, start, end}] that cover the text; kind is "" outside tags. An answer may begin inside a thought.
function folds(text) {
  const parts = [];
  let at = 0, open = null;
  const close = (kind, end) => { if (end > at) parts.push({ kind, start: at, end }); at = end; };
  for (const match of text.matchAll(TAG)) {
    const [whole, slash, name] = match, after = match.index + whole.length;
    if (!slash && open === null) { close("", match.index); open = name; }
    else if (slash && (open === name || open === null && parts.length === 0)) { close(TAGS[name], after); open = null; }
  }
  close(open === null ? "" : TAGS[open], text.length);
  return parts;
}

const fold = (kind, note, ...children) => el("details", { className: "fold", open: state.unfold !== "" }, el("summary", { textContent: [kind, note].filter(Boolean).join(" · ") }), el("div", {}, ...children));

// Text that nobody coloured, its tags folded.
function plainText(text) {
  return folds(text).map(({ kind, start, end }) => {
    const part = text.slice(start, end);
    return kind ? fold(kind, `${grouped(part.length)} characters`, part) : part;
  });
}

const picture = sha => el("img", { className: "picture", src: `images/${encodeURIComponent(sha)}.png`, alt: "image", title: sha, onerror: event => event.target.replaceWith("[image not kept]") });

function messageText(message) {
  const { content } = message;
  if (Array.isArray(content) && content.some(part => part.sha)) return content.flatMap(part => part.sha ? [picture(part.sha)] : plainText(part.text ?? ""));
  const text = typeof content === "string" ? content : (content || []).map(part => typeof part === "string" ? part : part.text ?? `[${part.type}]`).join("");
  const calls = (message.tool_calls || []).map(call => fold("tool call", (call.function || call).name, JSON.stringify((call.function || call).arguments, null, 1)));
  return [...(message.reasoning_content ? [fold("thinking", "", message.reasoning_content)] : []), ...(message.role === "tool" ? [fold("tool result", message.name, text)] : plainText(text)), ...calls];
}

const turn = (role, ...children) => el("div", { className: `turn ${role}` }, el("span", { className: "role", textContent: role }), ...children);

function promptNodes(text, messages) {
  if (!messages || messages.length < 2 && messages[0]?.role === "user" && !Array.isArray(messages[0].content)) return plainText(text);
  return messages.map(message => turn(message.role, ...messageText(message)));
}

// The tokens of an answer as spans, inside the folds of their tags and inside a turn for each change of speaker.
function answerNodes(row, spanOf) {
  const turns = row.values?.turn_ids, parts = folds(row.tokens.join(""));
  const nodes = [];
  let offset = 0, part = 0, speaker, into, folded;
  row.tokens.forEach((text, i) => {
    const speaks = turns ? turns[i] : undefined;
    while (parts[part] && offset >= parts[part].end) { part++; folded = undefined; }
    if (nodes.length === 0 || speaks !== speaker) {
      speaker = speaks;
      folded = undefined;
      into = turns ? turn(speaks < 0 ? "environment" : "assistant") : el("div", {});
      nodes.push(into);
    }
    const kind = parts[part]?.kind || "";
    if (kind && !folded) { folded = fold(kind, ""); folded.start = i; into.append(folded); }
    (kind ? folded.lastChild : into).append(spanOf(text, i));
    if (kind) folded.firstChild.textContent = `${kind} · ${grouped(i - folded.start + 1)} tokens`;
    offset += text.length;
  });
  return nodes;
}
