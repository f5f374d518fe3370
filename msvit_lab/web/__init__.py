"""The page: a static folder in which a gate, and a trained model beside its dense host, run in the browser.

    write_page(Path("page"), load_for_page(Path("runs/photos")), name="photos")
    write_page(Path("page"))                      # the gate that comes with msvit, alone
    PageServer(Path("page"), port=8000).serve_forever()

`static/` is written by hand: HTML, CSS and JavaScript modules, no build step. Any web server can serve the folder.
"""

from msvit_lab.web.page import load_for_page, write_page
from msvit_lab.web.runtime import find_runtime
from msvit_lab.web.server import PageServer

__all__ = ["PageServer", "find_runtime", "load_for_page", "write_page"]
