// Conversations, kept in this browser (IndexedDB, since images outgrow localStorage). Where a browser refuses to keep
// anything, as in some private windows, they last as long as the page.

const memory = new Map();
let opening;

function open() {
  opening ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("jaxsgl", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opening;
}

async function run(mode, work) {
  const database = await open();
  if (!database) return undefined;
  return new Promise((resolve, reject) => {
    const request = work(database.transaction("chats", mode).objectStore("chats"));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function allChats() {
  const kept = (await run("readonly", (chats) => chats.getAll())) ?? [...memory.values()];
  return kept.sort((a, b) => b.changed - a.changed);
}
export async function keepChat(chat) {
  memory.set(chat.id, chat);
  await run("readwrite", (chats) => chats.put(structuredClone(chat)));
}
export async function dropChat(id) {
  memory.delete(id);
  await run("readwrite", (chats) => chats.delete(id));
}
