// Requests to the server, beside the page: behind a reverse proxy both are below a path. If the server has a token, the
// user is asked for it once per tab.

const KEPT = `classroom-token ${location.pathname}`; // a proxy may have several servers under one name

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEPT);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Refused("The server does not answer. Is it still running?", 0);
  }
  if (answer.status === 401 && answer.headers.has("WWW-Authenticate")) {
    await askForToken(token !== null);
    return ask(path, options);
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(body?.detail ?? `The server answered ${answer.status}.`, answer.status);
  if (body === null) throw new Refused("The server's answer was cut off.", 0);
  return body;
}

let asking = null;

function askForToken(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("token-dialog");
    const box = document.getElementById("token");
    document.getElementById("token-wrong").hidden = !wrong;
    box.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      sessionStorage.setItem(KEPT, box.value.trim());
      box.value = "";
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

function query(parameters) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return new URLSearchParams(kept).toString();
}

export const get = (path, parameters = {}) => ask(`api/${path}?${query(parameters)}`);

export const post = (path, body) => ask(`api/${path}`, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
});

/** The URL hash of a page: its name and its parameters. */
export const link = (page, parameters = {}) => {
  const said = query(parameters);
  return `#/${page}${said ? `?${said}` : ""}`;
};
