# A server on TPUs.
# Build it in the repository: docker build -f deploy/tpu.Dockerfile -t jaxsgl:tpu .
FROM python:3.12-slim
RUN --mount=type=bind,target=/src,rw pip install --no-cache-dir '/src[tpu]'
# A new volume at .cache gets the owner and the mode that the folder has here.
RUN useradd --create-home --uid 10001 jaxsgl && install -d -m 700 -o jaxsgl -g jaxsgl /home/jaxsgl/.cache
USER 10001
ENTRYPOINT ["python", "-m", "jaxsgl.serve", "--host", "0.0.0.0"]
