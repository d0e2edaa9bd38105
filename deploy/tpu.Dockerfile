# A server on TPUs.
# Build it in the repository: docker build -f deploy/tpu.Dockerfile -t jaxsgl:tpu .
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir '/src[tpu]' && rm -r /src && useradd --create-home --uid 10001 jaxsgl
USER 10001
ENTRYPOINT ["python", "-m", "jaxsgl.serve", "--host", "0.0.0.0"]
