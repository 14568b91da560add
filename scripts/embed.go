// Package scripts embeds the scripts that set up a host, so that the agentlab
// program contains the scripts of its version.
package scripts

import "embed"

// FS holds the scripts of a host in the layout of this directory: lib.sh has
// the common code, net the scripts of the bridge, systemd the units.
//
//go:embed lib.sh install_host.sh create_api_token.sh create_template.sh net systemd
var FS embed.FS
