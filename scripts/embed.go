// Package scripts embeds the scripts with which a host is set up, so that the
// agentlab program carries those that belong to it.
package scripts

import "embed"

// FS holds the scripts of a host in the layout of this directory: lib.sh is
// what they share, net has those of the bridge, systemd the units.
//
//go:embed lib.sh install_host.sh create_api_token.sh create_template.sh net systemd
var FS embed.FS
