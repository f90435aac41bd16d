"""What people send: sizes of photos, screenshots, documents and videos, as data.

Padding is measured over these, and the tower's mode is chosen by them. Shares are rough and
stated, not measured: common camera, screen, paper and streaming formats.
"""

from dataclasses import dataclass

from tpu_vl.types import MediaKind


@dataclass(frozen=True)
class Sent:
    """Media of one size.

    Args:
        kind: "image" or "video".
        width, height: pixels.
        weight: how often, relative to the others of its list.
        num_frames: sampled from a video.
    """

    kind: MediaKind
    width: int
    height: int
    weight: float
    num_frames: int = 1


PHOTOS = (
    Sent("image", 4032, 3024, 5),  # 12 million pixels, the common phone camera
    Sent("image", 3024, 4032, 5),
    Sent("image", 4000, 2252, 1),
    Sent("image", 6000, 4000, 1),  # a camera of 24 million
    Sent("image", 2048, 1536, 2),  # as messengers shrink them
    Sent("image", 1600, 1200, 3),
    Sent("image", 1080, 1350, 3),  # social networks
    Sent("image", 1080, 1080, 2),
    Sent("image", 1280, 960, 2),
    Sent("image", 1024, 768, 3),  # from web pages
    Sent("image", 800, 600, 3),
    Sent("image", 640, 480, 3),
)
SCREENSHOTS = (
    Sent("image", 1920, 1080, 6),
    Sent("image", 2560, 1440, 3),
    Sent("image", 3840, 2160, 1),
    Sent("image", 1366, 768, 2),
    Sent("image", 1440, 900, 2),
    Sent("image", 2880, 1800, 2),
    Sent("image", 1170, 2532, 3),  # phones
    Sent("image", 1080, 2400, 3),
)
DOCUMENTS = (
    Sent("image", 1240, 1754, 3),  # A4 at 150, 200 and 300 dots an inch
    Sent("image", 1654, 2339, 3),
    Sent("image", 2480, 3508, 2),
    Sent("image", 1275, 1650, 2),  # letter at 150 and 200
    Sent("image", 1700, 2200, 2),
    Sent("image", 816, 1056, 1),
)
VIDEOS = (
    Sent("video", 1920, 1080, 3, num_frames=60),  # 30 s at two frames a second
    Sent("video", 1280, 720, 4, num_frames=20),
    Sent("video", 1280, 720, 2, num_frames=240),
    Sent("video", 1080, 1920, 3, num_frames=30),  # upright clips
    Sent("video", 640, 360, 2, num_frames=8),
    Sent("video", 640, 360, 1, num_frames=768),
    Sent("video", 320, 240, 1, num_frames=4),
)
MIXED = (*PHOTOS, *SCREENSHOTS, *DOCUMENTS, *VIDEOS)
"""The distribution over which padding and modes are judged."""

SMALL = (
    Sent("image", 224, 224, 3),  # inputs of classifiers, scaled up to 64 tokens
    Sent("image", 256, 256, 3),
    Sent("image", 320, 240, 2),
    Sent("image", 400, 300, 2),
    Sent("image", 336, 336, 2),
    Sent("image", 384, 384, 2),
    Sent("image", 448, 448, 2),
    Sent("image", 480, 360, 2),
    Sent("image", 500, 375, 3),
    Sent("image", 512, 384, 2),
    Sent("image", 512, 512, 3),
)
"""Small pictures, of 64 to 256 tokens."""

DISTRIBUTIONS = {
    "photos": PHOTOS,
    "screenshots": SCREENSHOTS,
    "documents": DOCUMENTS,
    "videos": VIDEOS,
    "mixed": MIXED,
    "small pictures": SMALL,
}
