# The gateway in front of servers: docker build -f deploy/gateway.Dockerfile -t smg .
FROM python:3.12-slim
RUN pip install --no-cache-dir 'smg>=1.13' && useradd --create-home --uid 10001 smg
USER 10001
ENTRYPOINT ["smg", "launch", "--host", "0.0.0.0", "--port", "8000"]
