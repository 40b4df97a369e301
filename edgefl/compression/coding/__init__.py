"""Sets of places, levels and labels as bytes, near their entropy; what tensor and value stages write with."""
