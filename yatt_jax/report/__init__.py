"""What a run leaves behind: metrics, samples, timeline, console output and the HTML report."""
