"""Pictures of what a language model does: for notebooks, and saved as .html, .svg or (with the `viz` extra) .png.

Each function returns a `Picture`. All come from the same steps: data, laid out as shapes in a `scene`, which is written
as SVG or drawn by matplotlib. They are self-contained, escaped, and read on light and dark pages.
"""

from jaxrt.display.lens import Lens as Lens
from jaxrt.display.lens import draw_lens as draw_lens
from jaxrt.display.lens import logit_lens as logit_lens
from jaxrt.display.lens import read_lens as read_lens
from jaxrt.display.lines import sweep as sweep
from jaxrt.display.logprobs import token_logprobs as token_logprobs
from jaxrt.display.maps import attention as attention
from jaxrt.display.picture import Picture as Picture
from jaxrt.display.sessions import session_tree as session_tree
