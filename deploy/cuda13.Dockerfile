# A server on NVIDIA GPUs: CUDA 13 comes with the packages, the driver (580 or newer) with the machine.
# Build it in the repository: docker build -f deploy/cuda13.Dockerfile -t jaxsgl:cuda13 .
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir '/src[cuda13]' && rm -r /src && useradd --create-home --uid 10001 jaxsgl
USER 10001
ENTRYPOINT ["python", "-m", "jaxsgl.serve", "--host", "0.0.0.0"]
