"""All-reduce over objects in a bucket: payloads, their mean, and the stand-alone form."""
