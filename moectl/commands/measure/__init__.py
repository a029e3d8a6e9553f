"""Commands of the chapter Measure: presets and policies beside each other."""
