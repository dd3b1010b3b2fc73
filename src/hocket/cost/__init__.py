"""What a layout costs, in numbers alone: never imports torch."""
