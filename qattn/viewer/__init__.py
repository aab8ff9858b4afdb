"""An interactive viewer in the browser, on viser (extra `view`): `qattn view scan.ply`.

`Model` computes pictures from states and knows nothing of browsers, `Worker` runs it beside the page, and `Viewer`
serves one page per browser.
"""

from qattn.viewer.model import PANELS, Model, Picture, State
from qattn.viewer.page import Viewer, exported_page
from qattn.viewer.worker import Worker

__all__ = ["PANELS", "Model", "Picture", "State", "Viewer", "Worker", "exported_page"]
