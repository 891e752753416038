/**
 * Who uses the engine: the tenants by their share of the tokens.
 */

import { make } from "../dom.js";
import { amount, count, percent } from "./texts.js";

const MAX_ROWS = 12;

/** @typedef {{ name: string, inPerS: number | null, outPerS: number | null, growth: number, total: number }} Tenant */

/** The tenants of a moment, those first who used most lately. @returns {Tenant[]} */
export function tenantsOf(/** @type {import("./history.js").View} */ view) {
  return view
    .labelled("tenant_generation_tokens_total", "tenant")
    .map(([name, out]) => {
      const into = out.replace("_generation_", "_prompt_");
      return {
        name,
        inPerS: view.perSecond(into),
        outPerS: view.perSecond(out),
        growth: (view.growth(into) ?? 0) + (view.growth(out) ?? 0),
        total: (view.value(into) ?? 0) + (view.value(out) ?? 0),
      };
    })
    .sort((one, other) => other.growth - one.growth || other.total - one.total || one.name.localeCompare(other.name));
}

export class TenantTable {
  #body;
  #more;

  /** @param {{ body: HTMLElement, more: HTMLElement }} options */
  constructor({ body, more }) {
    this.#body = body;
    this.#more = more;
  }

  /** `hasTokens`: somebody has had some, whoever it was: names are told to admins alone. */
  show(/** @type {Tenant[]} */ tenants, /** @type {boolean} */ hasTokens) {
    const all = tenants.reduce((sum, { growth }) => sum + growth, 0);
    const shown = tenants.slice(0, MAX_ROWS);
    while (this.#body.children.length > shown.length) this.#body.lastElementChild?.remove();
    shown.forEach((tenant, index) => {
      const row = this.#body.children[index] ?? this.#body.appendChild(emptyRow());
      fill(row, tenant, all > 0 ? tenant.growth / all : null);
    });
    const numMore = tenants.length - shown.length;
    const nobody = hasTokens ? "An admin’s key shows them." : "No tokens for anybody yet.";
    this.#more.textContent = tenants.length === 0 ? nobody : numMore > 0 ? `and ${numMore} more` : "";
  }
}

function emptyRow() {
  const row = make("tr");
  const name = make("th");
  name.setAttribute("scope", "row");
  const share = make("td", "share");
  const bar = make("meter");
  bar.setAttribute("aria-hidden", "true"); // the number next to it says the same
  share.append(bar, make("span"));
  row.append(name, share, make("td"), make("td"), make("td"));
  return row;
}

function fill(/** @type {Element} */ row, /** @type {Tenant} */ tenant, /** @type {number | null} */ share) {
  const [name, shareCell, out, into, total] = row.children;
  name.textContent = tenant.name;
  const [bar, text] = shareCell.children;
  /** @type {HTMLMeterElement} */ (bar).value = share ?? 0;
  text.textContent = percent(share);
  out.textContent = amount(tenant.outPerS);
  into.textContent = amount(tenant.inPerS);
  total.textContent = count(tenant.total);
}
