"""What a run looks like: reads run directories, writes nothing into them, and never imports torch."""
