"""Pieces of an HTML page that needs nothing but itself. Text goes in plain and comes out escaped.

    body = section("Runs", join([table(["run", "top-1"], [["gbas", "93.1 %"]], label="All runs"), figure(plot)]))
    html = page("msvit report", lead=answer(["gbas: 93.1 % at 0.31 GMACs"]), body=body, foot="Written by msvit.")

`Html` marks what is markup already; every plain string is escaped where it enters.
"""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from string import Template

from msvit.lab.viz.figures import Plot

CSS = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f7f9; --ink: #1b1f24; --soft: #59626d; --line: #d5dae0;
        --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --card: #1c2026; --ink: #e7eaee; --soft: #a3acb8; --line: #363d46; --link: #7cb8f5; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
       overflow-wrap: anywhere; }
main { max-width: 84rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.15rem; font-weight: 600; color: var(--soft); margin: 0 0 .5rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .75rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; }
a { color: var(--link); }
.answer { font-size: clamp(1.3rem, 1rem + 1.6vw, 2rem); line-height: 1.3; font-weight: 650; margin: 0 0 .5rem;
          max-width: none; }
p + .answer { margin-top: 1.5rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.missing { border-left: 3px solid var(--line); padding-left: .75rem; color: var(--soft); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .45rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { background: var(--card); font-weight: 600; white-space: normal; vertical-align: bottom;
     overflow-wrap: normal; min-width: 4rem; }
tr:last-child > * { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; }
.facts th, .facts td { text-align: left; white-space: normal; }
.narrow { display: none; }
.summary th:first-child, .summary td:first-child { position: sticky; left: 0; background: var(--card);
  white-space: normal; min-width: 11rem; border-right: 1px solid var(--line); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
.flow { columns: 22rem; column-gap: 1rem; }
.plots figure, .flow figure { margin: 0 0 1rem; break-inside: avoid; padding: .75rem; border-radius: 8px;
  background: var(--card); }
figure svg { display: block; width: 100%; max-width: 32rem; height: auto; margin: 0 auto .5rem; }
figure svg text { font-family: system-ui, sans-serif !important; }
.samples { list-style: none; margin: .75rem 0; padding: 0; display: grid; gap: .9rem .75rem;
           grid-template-columns: repeat(auto-fill, minmax(min(46%, 10.5rem), 1fr)); }
.rows { list-style: none; margin: .75rem 0; padding: 0; }
.rows li { padding: .75rem 0; border-top: 1px solid var(--line); }
.row { display: grid; gap: .5rem .75rem; grid-template-columns: repeat(4, 1fr); }
.row span { display: block; color: var(--soft); font-size: .85rem; }
.samples figure, .rows figure { margin: 0; }
.samples img, .row img { display: block; width: 100%; height: auto; border-radius: 3px; }
.row img { outline: 1px solid var(--line); outline-offset: -1px; }
.samples figcaption { line-height: 1.35; margin-top: .3rem; font-size: .85rem; }
.rows figcaption { margin-top: .5rem; }
.samples b, .rows b { color: var(--ink); font-weight: 600; }
.opening { list-style: none; margin: .5rem 0 1rem; padding: 0; display: grid; gap: 1rem 1.25rem;
           grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
.opening figure { margin: 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .35rem; }
.pair img { display: block; width: 100%; height: auto; border-radius: 3px; }
.opening figcaption { margin-top: .3rem; }
.opening b { color: var(--ink); }
.key { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; max-width: none; margin: 1rem 0 .5rem; }
.key > span { display: inline-flex; align-items: center; gap: .5rem; }
.cell { display: inline-grid; width: 1.6rem; height: 1.6rem; flex: none; border: 2px solid #333; background: #aab0b6; }
.cell.fine { grid-template-columns: repeat(var(--k), 1fr); gap: 1px; border: 1px solid #333; background: #333; }
.cell.fine span { background: #f2b134; }
.words { margin: .75rem 0; max-width: 62rem; }
.words div { margin: .15rem 0; }
.words dt { display: inline; font-weight: 600; color: var(--ink); }
.words dt::after { content: ": "; }
.words dd { display: inline; margin: 0; }
.swatch { display: inline-block; width: .85em; height: .85em; margin: 0 .35em 0 0; vertical-align: -.06em;
          border: 1px solid var(--soft); border-radius: 2px; }
.class { display: inline-block; margin-right: .9em; }
details { margin: .6rem 0; border: 1px solid var(--line); border-radius: 8px; padding: .5rem .75rem; }
summary { cursor: pointer; font-weight: 600; }
details .scroll { border: 0; border-radius: 0; }
pre { margin: .5rem 0 0; overflow-x: auto; font: .82rem/1.45 ui-monospace, monospace; }
footer { margin-top: 3rem; }
@media (max-width: 40rem) {
  .narrow { display: block; }
  main { padding: 1rem .75rem 3rem; }
  .summary th:first-child, .summary td:first-child { min-width: 7.5rem; }
  .plots figure, .flow figure { padding: .4rem .3rem .6rem; }
  .plots figcaption, .flow figcaption { padding: 0 .3rem; }
  .row { grid-template-columns: repeat(2, 1fr); }
  .opening li:nth-child(n+4) { display: none; }
}
"""

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$css</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
$lead
</header>
$body
<footer class="soft"><p>$foot</p></footer>
</main>
</body>
</html>
""")


class Html(str):
    """Markup, to be taken as it is."""


def text(value: str) -> Html:
    return value if isinstance(value, Html) else Html(escape(value))


def join(pieces: Sequence[Html]) -> Html:
    return Html("\n".join(pieces))


def page(title: str, lead: Html, body: Html, foot: str) -> str:
    """The whole page. `lead`: the answer, before everything else."""
    return PAGE.substitute(title=text(title), css=CSS, lead=lead, body=body, foot=text(foot))


def answer(lines: Sequence[str]) -> Html:
    """The answer in large letters, then what qualifies it."""
    return join([paragraph(lines[0], "answer"), *(paragraph(line) for line in lines[1:] if line)])


def section(title: str, body: Html, anchor: str = "") -> Html:
    mark = f' id="{escape(anchor)}"' if anchor else ""
    return Html(f"<section{mark}>\n<h2>{text(title)}</h2>\n{body}\n</section>")


def paragraph(value: str, kind: str = "") -> Html:
    return Html(f'<p class="{kind}">{text(value)}</p>' if kind else f"<p>{text(value)}</p>")


def missing(sentence: str) -> Html:
    """What stands where something would have stood."""
    return paragraph(sentence, "missing")


def link(value: str, anchor: str) -> Html:
    return Html(f'<a href="#{escape(anchor)}">{text(value)}</a>')


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str, kind: str = "plain") -> Html:
    """A table that scrolls in a box of its own where the page is narrow."""
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    lines = "\n".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return Html(
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table class="{kind}">\n'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def figure(plot: Plot) -> Html:
    return Html(f"<figure>{plot.svg}<figcaption>{text(plot.caption)}</figcaption></figure>")


def plots(pieces: Sequence[Html], kind: str = "plots") -> Html:
    """Figures side by side where the page is wide: in rows ("plots"), or in columns as they fit ("flow")."""
    return Html(f'<div class="{kind}">\n' + "\n".join(pieces) + "\n</div>") if pieces else Html("")


def picture(content: bytes, alt: str) -> Html:
    """A picture from the content of its file, WebP or PNG."""
    kind = "png" if content.startswith(b"\x89PNG") else "webp"
    return Html(f'<img alt="{escape(alt)}" src="data:image/{kind};base64,{b64encode(content).decode()}">')


def photo(webp: bytes, alt: str, caption: Html) -> Html:
    """One picture of a `gallery`."""
    return Html(f"<li><figure>{picture(webp, alt)}<figcaption>{caption}</figcaption></figure></li>")


def gallery(photos: Sequence[Html]) -> Html:
    return Html('<ul class="samples">\n' + "\n".join(photos) + "\n</ul>")


def row(pictures: Sequence[tuple[str, Html]], caption: Html) -> Html:
    """Pictures that belong together, each under its title: one of `rows`. Four of them are 2 x 2 on a phone."""
    cells = "".join(f"<div><span>{text(title)}</span>{image}</div>" for title, image in pictures)
    return Html(f'<li><figure><div class="row">{cells}</div><figcaption>{caption}</figcaption></figure></li>')


def rows(items: Sequence[Html]) -> Html:
    return Html('<ol class="rows">\n' + "\n".join(items) + "\n</ol>")


def words(items: Sequence[tuple[str, str]]) -> Html:
    """What words mean, one line each."""
    lines = "".join(f"<div><dt>{text(word)}</dt><dd>{text(meaning)}</dd></div>" for word, meaning in items)
    return Html(f'<dl class="words soft">{lines}</dl>')


def pair(images: Sequence[bytes], alt: str, num: int, dense: int) -> Html:
    """An image and its tokens side by side: one of the `opening`."""
    plain, drawn = picture(images[0], ""), picture(images[1], alt)
    return Html(
        f'<li><figure><div class="pair">{plain}{drawn}</div><figcaption><b>{num} tokens</b> instead of {dense}'
        "</figcaption></figure></li>"
    )


def opening(pairs: Sequence[Html], k: int, cell_tokens: int) -> Html:
    """Images with their tokens, and what the squares mean: the one picture that needs no further words."""
    squares = "<span></span>" * k**2
    large = f"large square: {cell_tokens} token{'s' if cell_tokens > 1 else ''}"
    small = f"{k**2} small squares: {k**2} tokens, where details matter"
    legend = (
        f'<p class="key"><span><span class="cell"></span>{large}</span> '
        f'<span><span class="cell fine" style="--k:{k}">{squares}</span>{small}</span></p>'
    )
    return Html(f'{legend}\n<ul class="opening">\n' + "\n".join(pairs) + "\n</ul>")


def swatch(name: str, background: str) -> Html:
    """An entry of a legend."""
    return Html(f'<span class="class"><i class="swatch" style="background:{background}"></i>{text(name)}</span>')


def details(title: str, body: Html, is_open: bool = False) -> Html:
    return Html(f"<details{' open' if is_open else ''}><summary>{text(title)}</summary>\n{body}\n</details>")


def preformatted(value: str) -> Html:
    return Html(f'<pre tabindex="0">{text(value)}</pre>')
