"""The engine: many requests through one model, a step at a time.

``request`` says what is asked and what comes back, ``engine`` is the loop, ``scheduler`` decides what a step runs,
``runner`` is what a device must offer; everything below a runner knows nothing of requests' texts or clients.
"""
