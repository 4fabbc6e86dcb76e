"""Names and digests of container images, in the forms that records and lock files may hold.

The names are those of image references (github.com/distribution/reference) without a digest, of ASCII letters only, so
that none can hold a control character or a space.
"""

from typing import Annotated, TypeAlias

from pydantic import Field

NAME_FORM = r"[A-Za-z0-9\[][A-Za-z0-9._:/\[\]-]{0,399}"
DIGEST_FORM = r"sha256:[0-9a-f]{64}"
MOST_IMAGES = 64

ImageName: TypeAlias = Annotated[str, Field(pattern=rf"^{NAME_FORM}$")]
ImageDigest: TypeAlias = Annotated[str, Field(pattern=rf"^{DIGEST_FORM}$")]
ImageDigests: TypeAlias = Annotated[dict[ImageName, ImageDigest], Field(max_length=MOST_IMAGES)]
