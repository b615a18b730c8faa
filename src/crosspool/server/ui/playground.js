// One message to two or three models at once, their answers streaming side by side.

import { call, eventsOf } from "./access.js";
import { full } from "./colours.js";

const MOST = 3;

export class Playground {
  constructor() {
    this.choices = document.querySelector("#choices");
    this.answers = document.querySelector("#answers");
    this.error = document.querySelector("#ask-error");
    this.send = document.querySelector("#send");
    this.stop = document.querySelector("#stop");
    this.cards = [];
    this.running = null;
    document.querySelector("#ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    document.querySelector("#prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.ask();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
  }

  setModels(cards) {
    if (cards.map((card) => card.id).join() === this.cards.map((card) => card.id).join()) return;
    this.cards = cards;
    this.choices.replaceChildren(...cards.map((card, index) => {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.value = card.id;
      box.checked = index < MOST;
      label.append(box, ` ${card.id}`);
      return label;
    }));
  }

  async ask() {
    if (this.running) return;
    const names = [...this.choices.querySelectorAll("input:checked")].map((box) => box.value);
    const text = document.querySelector("#prompt").value.trim();
    const problem = !text ? "Write a message first." :
      !names.length ? "Choose a model first." : names.length > MOST ? `Choose at most ${MOST} models.` : "";
    this.error.hidden = !problem;
    this.error.textContent = problem;
    if (problem) return;
    this.running = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    const asked = names.map((name) => this.answer(this.cards.find((card) => card.id === name), text));
    this.answers.replaceChildren(...asked.map(({ box }) => box));
    await Promise.all(asked.map(({ done }) => done));
    this.running = null;
    this.send.disabled = false;
    this.stop.disabled = true;
  }

  answer(card, text) {
    const box = document.createElement("article");
    box.className = "answer";
    box.style.setProperty("--own", full(card.id));
    box.innerHTML = '<h3></h3><p class="text" aria-live="polite" aria-busy="true"></p><p class="facts">waiting</p>';
    box.querySelector("h3").textContent = card.id;
    return { box, done: this.stream(card, text, box) };
  }

  async stream(card, text, box) {
    const out = box.querySelector(".text");
    const facts = box.querySelector(".facts");
    const signal = this.running.signal;
    const started = performance.now();
    let first = 0;
    let tokens = 0;
    try {
      const isChat = card.crosspool.has_chat_template;
      const body = {
        model: card.id, stream: true, stream_options: { include_usage: true },
        max_tokens: Number(document.querySelector("#max-tokens").value) || 80,
        temperature: Number(document.querySelector("#temperature").value),
        ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
      };
      const path = isChat ? "v1/chat/completions" : "v1/completions";
      const headers = { "Content-Type": "application/json" };
      const response = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") break;
        const piece = JSON.parse(data);
        if (piece.error) throw new Error(piece.error.message);
        tokens = piece.usage?.completion_tokens ?? tokens;
        const said = piece.choices.map((choice) => choice.delta?.content ?? choice.text ?? "").join("");
        if (said && !first) {
          first = performance.now();
          facts.textContent = "answering";
        }
        out.append(said);
      }
      const seconds = (performance.now() - started) / 1000;
      facts.textContent = `${tokens} tokens in ${seconds.toFixed(2)} s, first after ${Math.round(first - started)} ms`;
    } catch (error) {
      facts.textContent = signal.aborted ? "stopped" : error.message;
      facts.classList.toggle("failed", !signal.aborted);
    } finally {
      out.setAttribute("aria-busy", "false");
    }
  }
}
