# Terminals load the .env files of the repository of a session.
if [ -n "${BASH_VERSION-}" ] && command -v direnv >/dev/null; then
    export DIRENV_CONFIG=/etc/direnv
    eval "$(direnv hook bash)"
fi
